"""What the text of a model specification names, and its mistakes, before anything is built. Torch-free."""

from __future__ import annotations

import difflib
from pathlib import Path

from autopar.errors import ConfigError
from autopar.trace.models.dimspec import FAMILIES, parse_dims
from autopar.trace.models.shipped import SHIPPED


def spec_file(spec: str) -> str | None:
    """The file or folder that `hf:DIR_OR_CONFIG.json` or `FILE.py:function` names; None for dims and names."""
    kind, _, rest = spec.partition(":")
    if spec in SHIPPED or kind in FAMILIES:
        return None
    if kind == "hf":
        return rest
    return spec.rpartition(":")[0] or spec if ".py" in spec else None


def spec_mistakes(spec: str, seq_len: int | None = None, folder: Path = Path()) -> tuple[str, ...]:
    """What is wrong with a specification as far as its text and the presence of its file (in `folder`) say."""
    kind, _, rest = spec.partition(":")
    file = spec_file(spec)
    if kind in FAMILIES:
        return _dims_mistakes(spec, seq_len)
    if file is None:
        return () if spec in SHIPPED else (unknown_model(spec),)
    if kind == "hf":
        where = folder / rest
        there = rest and (where / "config.json" if where.is_dir() else where).is_file()
        return () if there else (f"{spec}: no such file; give a configuration file or the folder that has config.json",)
    return tuple(function_mistakes(spec, seq_len, folder))


def function_mistakes(spec: str, seq_len: int | None, folder: Path = Path()) -> list[str]:
    """Mistakes in `FILE.py:function`."""
    path, _, name = spec.rpartition(":")
    if not path or not name.isidentifier():
        return [f"{spec}: give FILE.py:function, the function returning a model and its example inputs"]
    found = [] if (folder / path).is_file() else [f"{path}: no such file; give FILE.py:function"]
    if seq_len is not None:
        found.append(f"{spec}: --seq-len {seq_len} can't be applied to a function; it makes its own inputs")
    return found


def unknown_model(spec: str) -> str:
    """That `spec` names no model, and what may be given."""
    near = difflib.get_close_matches(spec, SHIPPED, 3) or list(SHIPPED)
    return (
        f"model {spec!r} is unknown. Give a shipped name ({', '.join(near)}; `autopar models` lists all), dims such as "
        "gpt:layers=12,hidden=768,heads=12,vocab=50257, hf:DIR_OR_CONFIG.json, or FILE.py:function."
    )


def _dims_mistakes(spec: str, seq_len: int | None) -> tuple[str, ...]:
    try:
        parse_dims(spec, seq_len)
    except ConfigError as error:
        return error.mistakes
    return ()
