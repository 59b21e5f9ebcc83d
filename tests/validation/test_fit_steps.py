"""The fit of step constants: made-up runs of known constants give them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path

import numpy as np

from autopar.rows import Table
from autopar.transformer.constants import Constants
from autopar.transformer.step import step_time
from autopar.validation.steps import ReadRow, read_rows
from benchmarks.fit_steps import Timed, fit
from tests.validation.test_steps import ROW


def made_runs(made: Constants) -> list[Timed]:
    rows = [
        {"tp": tp, "dp": str(64 // int(tp)), "seq_len": seq, "micro_batch": size, "recompute": again}
        for tp, seq, size, again in product("1248", ("2048", "8192"), "12", ("none", "full"))
    ]
    reads = [read for read in read_rows([Table(Path("rows.csv"), "training", [ROW | row for row in rows])])
             if isinstance(read, ReadRow)]  # fmt: skip
    return [Timed(read, step_time(read.costs, made, simulated=False).step_time_s, "lab") for read in reads]


def error(found: Constants, timed: Sequence[Timed]) -> float:
    """Median error of steps predicted with some constants."""
    again = [step_time(row.read.costs, found, simulated=False).step_time_s / row.seconds for row in timed]
    return float(np.median(np.abs(np.array(again) - 1)))


def test_known_constants_are_found() -> None:
    """Runs timed with slower products and links than expected are explained within a few percent.

    By several labs better than by one, of which it may be the habit; a wild row among them moves that by little.
    """
    made = Constants(dict(Constants.expected().table) | {"gemm": 1.45, "inside": 1.5})
    timed = made_runs(made)
    labs = [replace(row, source=f"lab {i % 4}") for i, row in enumerate(timed)]
    one, several = fit(timed), fit(labs)
    wild = fit([*labs, replace(labs[0], seconds=3 * labs[0].seconds)])
    assert error(Constants.expected(), timed) > 0.1
    assert error(several, timed) < error(one, timed) < 0.06
    assert error(several, timed) < 0.03
    assert error(wild, timed) < error(several, timed) + 0.01


def test_a_slow_source_bends_constants_less() -> None:
    """Of four labs the one with tensor parallel 8 takes a sixth longer for everything.

    Its links are blamed for less of that than where all runs are one lab's.
    """
    timed = made_runs(Constants.expected())
    slow = [replace(row, seconds=row.seconds * (1.17 if i // 8 == 3 else 1.0)) for i, row in enumerate(timed)]
    labs = [replace(row, source=f"lab {i // 8}") for i, row in enumerate(slow)]
    known, unknown = (abs(log(fit(rows).of("inside") / Constants.expected().of("inside"))) for rows in (labs, slow))
    assert known < 0.75 * unknown
