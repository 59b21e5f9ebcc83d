"""Tables of measurements that `validate` and `validate-ops` read: CSV files, also compressed, and their columns."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from autopar.errors import ConfigError, reason_of

KINDS = {
    "memory": ("row_id", "gpu", "component"),
    "training": ("row_id", "gpu"),
    "gemm": ("gpu", "dtype", "m", "n", "k"),
    "attention": ("gpu", "dtype", "batch", "heads", "seq_q", "head_dim"),
    "elementwise": ("gpu", "op", "dtype", "rows", "cols"),
    "collectives": ("gpu", "link", "collective", "n_ranks", "bytes"),
}
"""Columns by which a kind of table is known; every other column may be missing and counts as empty."""

STEP_KINDS = ("memory", "training")
OP_KINDS = ("gemm", "attention", "elementwise", "collectives")


@dataclass(frozen=True)
class Table:
    """A file's rows as text by column; empty where the file has no such column."""

    path: Path
    kind: str
    rows: list[dict[str, str]]


def read_tables(paths: Sequence[Path], kinds: Sequence[str]) -> list[Table]:
    """Read tables of any of `kinds`; raises ConfigError with every mistake in all files."""
    tables: list[Table] = []
    mistakes: list[str] = []
    for path in paths:
        try:
            tables.append(_read_table(path, kinds))
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(*mistakes)
    return tables


def repeated_ids(tables: Sequence[Table]) -> list[str]:
    """What `row_id` stands for several rows of one kind, in words."""
    counts = Counter((table.kind, row["row_id"]) for table in tables for row in table.rows if row.get("row_id"))
    return [f"{kind} row_id {name!r} stands for {n} rows" for (kind, name), n in counts.items() if n > 1]


def _read_table(path: Path, kinds: Sequence[str]) -> Table:
    try:
        with _open(path) as file:
            reader = csv.DictReader(file)
            kind = _kind_of(path, tuple(name.strip() for name in reader.fieldnames or ()), kinds)
            rows = [{key.strip(): value or "" for key, value in row.items() if key} for row in reader]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path}: can't be read as a table ({reason_of(error)}). Give a .csv or .csv.gz file."
        ) from None
    return Table(path, kind, rows)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def _kind_of(path: Path, columns: tuple[str, ...], kinds: Sequence[str]) -> str:
    lacking = {kind: [c for c in KINDS[kind] if c not in columns] for kind in kinds}
    for kind in kinds:
        if not lacking[kind]:
            return kind
    raise ConfigError(
        *(
            f"{path}: as a table of {kind} it lacks the columns {', '.join(missing)}"
            for kind, missing in lacking.items()
        )
    )
