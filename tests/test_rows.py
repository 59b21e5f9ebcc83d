"""Tables of measurements: kinds and mistakes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.rows import OP_KINDS, STEP_KINDS, read_tables, repeated_ids


@pytest.mark.parametrize(
    ("columns", "kinds", "kind"),
    [
        ("row_id,gpu,step_time_s", STEP_KINDS, "training"),
        ("row_id,gpu,component", STEP_KINDS, "memory"),
        ("gpu,dtype,m,n,k,time_us", OP_KINDS, "gemm"),
        ("gpu,dtype,batch,heads,seq_q,head_dim,time_us", OP_KINDS, "attention"),
        ("gpu,op,dtype,rows,cols,extra", OP_KINDS, "elementwise"),
        ("gpu,link,collective,n_ranks,bytes", OP_KINDS, "collectives"),
    ],
)
def test_kind_by_columns(tmp_path: Path, columns: str, kinds: tuple[str, ...], kind: str) -> None:
    """A table's kind is known by its columns; compressed files are read alike."""
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    text = columns + "\n" + ",".join("x" for _ in columns.split(",")) + "\n"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    first, second = read_tables([plain, packed], kinds)
    assert (first.kind, second.kind) == (kind, kind)
    assert first.rows == second.rows == [dict.fromkeys(columns.split(","), "x")]


def test_mistakes_of_all_files(tmp_path: Path) -> None:
    """Absent, foreign and broken files are all named, with the columns that are missing."""
    foreign, broken = tmp_path / "foreign.csv", tmp_path / "broken.csv.gz"
    foreign.write_text("row_id,time\n1,2\n")
    broken.write_bytes(b"not gzip")
    with pytest.raises(ConfigError) as caught:
        read_tables([foreign, broken, tmp_path / "absent.csv"], STEP_KINDS)
    text = "\n".join(caught.value.mistakes)
    assert "foreign.csv: as a table of training it lacks the columns gpu" in text
    assert "broken.csv.gz: can't be read" in text
    assert "absent.csv: can't be read as a table (No such file or directory). Give" in text


def test_repeated_ids_are_named(tmp_path: Path) -> None:
    """A row_id that several rows of a kind have, in whatever files, is named with how many; none else is."""
    for name, rows in {"a": "1,x\n1,x\n2,x\n", "b": "1,x\n3,x\n,x\n,x\n"}.items():
        (tmp_path / f"{name}.csv").write_text("row_id,gpu\n" + rows)
    (tmp_path / "c.csv").write_text("row_id,gpu,component\n2,x,y\n")
    tables = read_tables([tmp_path / f"{name}.csv" for name in "abc"], STEP_KINDS)
    assert repeated_ids(tables) == ["training row_id '1' stands for 3 rows"]
