"""Plan files: how they are written, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.files import write_atomically
from autopar.formulate.config import ManualConfig
from autopar.plan import PlanRecord
from tests.formulate.cases import planner


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    """What is written can be read by whom the umask lets, and nothing else is left in the folder."""
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "plan.json", "{}")
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("plan.json", 0o640)


@pytest.fixture(scope="module")
def record() -> PlanRecord:
    """A small plan."""
    return planner("mlp").estimate(ManualConfig(dp=2))


def test_what_is_saved_is_read(record: PlanRecord, tmp_path: Path) -> None:
    """A plan read from its file is the plan."""
    record.save(tmp_path / "plan.json")
    assert PlanRecord.load(tmp_path / "plan.json") == record


@pytest.mark.parametrize("number", [0, -1, 99, None, "1", True])
def test_unknown_formats_are_refused(record: PlanRecord, number: object) -> None:
    """A file of another format than those there are is refused with the formats that can be read."""
    with pytest.raises(PlanError, match="this autopar reads 1 to 1"):
        PlanRecord.from_json(record.to_json() | {"plan_format": number})


def _assign_beyond(stage: dict[str, Any]) -> None:
    stage["assignment"][0] = 99


def _assign_before(stage: dict[str, Any]) -> None:
    stage["assignment"][-1] = -1


def _lengthen_entry(stage: dict[str, Any]) -> None:
    stage["strategies"][0]["entry"].append(0)


def _level_nine(stage: dict[str, Any]) -> None:
    stage["strategies"][0]["zero"] = 9


def _shorten_op(stage: dict[str, Any]) -> None:
    ops = stage["strategies"][0]["ops"]
    ops[next(iter(ops))] = []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_assign_beyond, r"stages\.0\.assignment: 99 is none of the"),
        (_assign_before, r"stages\.0\.assignment: -1 is none of the"),
        (_lengthen_entry, r"stages\.0\.strategies\.0: entry is placed on 2 axes, the mesh has 1"),
        (_level_nine, r"stages\.0\.strategies\.0: zero is 9, recompute 'none'"),
        (_shorten_op, r"stages\.0\.strategies\.0: \S+ is placed on 0 axes, the mesh has 1"),
    ],
    ids=["assignment", "negative", "entry", "zero", "op"],
)
def test_damaged_plans_are_refused(record: PlanRecord, damage: Any, words: str) -> None:
    """Assigned strategies must be there and placements have an entry for each axis; the place of a mistake is named."""
    data = record.to_json()
    damage(data["stages"][0])
    with pytest.raises(PlanError, match=words):
        PlanRecord.from_json(data)
