"""The files that a file named in a job depends on: what a point's answer may change with."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path


def files_behind(file: Path) -> list[Path]:
    """The file, or the configuration in a folder; then modules of its folder that it imports, tables that it names."""
    if file.is_dir():
        return [file / "config.json"]
    if file.suffix == ".py":
        return _modules(file)
    return [file, *_tables(file)] if file.suffix == ".toml" else [file]


def _modules(file: Path) -> list[Path]:
    """The file and, of the modules beside it, those it imports, directly or by others, in the order they are met."""
    found, folder = [file], file.parent
    for module in found:
        for name in _imported(module):
            path = folder.joinpath(*name.split("."))
            there = [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file() and p not in found]
            found += there
    return found


def _imported(module: Path) -> Iterator[str]:
    """Names of what a module imports, and of the packages they lie in; nothing where it can't be read."""
    try:
        tree = ast.parse(module.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[: n + 1]) for n in range(len(parts)))


def _tables(file: Path) -> list[Path]:
    """The tables of links that a cluster file names."""
    try:
        wires = tomllib.loads(file.read_text(encoding="utf-8")).get("wires", {})
    except (OSError, ValueError):
        return []
    names = wires.values() if isinstance(wires, dict) else ()
    return [file.parent / name for name in names if isinstance(name, str)]
