"""Every legal cell of schedule x ZeRO x recomputation under twelve mixed plans is exact: real processes, float64.

Models take turns: every cell meets every model that its plans suit, and every plan does; in all some 1150 cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from autopar.cells import CELLS
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from tests.integration.models import traced
from tests.integration.staged import one_stage, staged
from tests.integration.test_pipelines import check
from tests.pool import Pool

BATCH, MICROBATCHES = 16, 4
BLOCKS, OTHERS, TIED = ("deep llama", "deep vit"), ("skips", "cnn with groups"), ("deep gpt", "deep bert")
FOUR = {"interleaved", "zbv", "dualpipev"}
"""Schedules of two stages a group."""


class Mix(NamedTuple):
    """A plan of `ranks` ranks a group: configurations of the first and the second group, and who can be planned so.

    {zero}, {other}: the cell's level and another one; {recompute}: the cell's. `alone` is for one stage.
    """

    ranks: int
    first: str
    second: str = ""
    alone: str = ""
    models: tuple[str, ...] = (*BLOCKS, *OTHERS, *TIED)
    uneven: bool = False


CELL = "zero={zero},recompute={recompute}"
MIXES = {
    "dp 2": Mix(2, f"dp=2,{CELL}"),
    "dp 4": Mix(4, f"dp=4,{CELL}"),
    "dp 2 x tp 2": Mix(4, f"dp=2,tp=2,{CELL}"),
    "dp 2 x sequence 2": Mix(4, f"dp=2,tp=2,sp=1,{CELL}", models=(*BLOCKS, *TIED)),
    "uneven stages": Mix(2, f"dp=2,{CELL}", uneven=True, alone=f"dp=2,{CELL},layers=0:recompute=full"),
    "dp 2, then tp 2": Mix(2, f"dp=2,{CELL}", f"tp=2,{CELL}", f"dp=2,{CELL},layers=2-3:tp=2", (*BLOCKS, "skips")),
    "tp 2, then dp 2": Mix(2, f"tp=2,{CELL}", f"dp=2,{CELL}", f"dp=2,{CELL},layers=0-1:tp=2", (*BLOCKS, "skips")),
    "dp 4, then on another mesh": Mix(
        4, f"dp=4,{CELL}", f"dp=4,{CELL},layers=0:tp=2", f"dp=4,{CELL},layers=0-1:tp=2", (*BLOCKS, *TIED)
    ),
    "ZeRO by layer": Mix(2, f"dp=2,{CELL},layers=1-2:zero={{other}}", models=(*BLOCKS, *TIED)),
    "recomputation by layer": Mix(2, f"dp=2,{CELL},layers=1-2:recompute=none", models=(*BLOCKS, *TIED)),
    "both by layer": Mix(4, f"dp=4,{CELL},layers=1-2:zero={{other}}+recompute=full", models=(*BLOCKS, *TIED)),
    "another mesh by layer": Mix(4, f"dp=4,{CELL},layers=0:tp=2;3:tp=4", models=(*BLOCKS, *TIED)),
}


class Case(NamedTuple):
    """A model under a mixed plan in a cell."""

    model: str
    mix: str
    schedule: str
    zero: int
    recompute: str


def cases() -> Iterator[Case]:
    """Every cell under every mixed plan, with the model whose turn it is."""
    cells = [(s, z, r) for s, cell in CELLS.items() for z in sorted(cell.zero_levels) for r in sorted(cell.recomputes)]
    for i, cell in enumerate(cells):
        for j, (name, mix) in enumerate(MIXES.items()):
            yield Case(mix.models[(i + j) % len(mix.models)], name, *cell)


def record_of(case: Case, graph: OpGraph) -> PlanRecord:
    """The plan of a case."""
    mix, words = MIXES[case.mix], {"zero": case.zero, "other": 3 - case.zero, "recompute": case.recompute}
    first, second = (text.format(**words) for text in (mix.first, mix.second or mix.first))
    if case.schedule in ("none", "accumulate"):
        text = mix.alone.format(**words) or first
        ways = int(text.split(",")[0].removeprefix("dp="))
        count = 1 if case.schedule == "none" else MICROBATCHES
        return one_stage(graph, f"{text},microbatch_size={BATCH // ways // count}", mix.ranks, BATCH)
    before = ((1, 1, 1) if mix.uneven else (2, 1, 1)) if case.schedule in FOUR else ((1,) if mix.uneven else (3,))
    counts = (*before, len(graph.layers) - sum(before))
    return staged(graph, (first, second), counts, case.schedule, MICROBATCHES, mix.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id="-".join(map(str, case))) for case in cases()])
def test_cell_is_exact(pool: Pool, case: Case) -> None:
    """Loss, every gradient and the parameters after three AdamW steps equal those of one device to 1e-9."""
    graph = traced(case.model)
    record = record_of(case, graph)
    report = pool.run(record.request.devices, check, record, graph, case.model, timeout_s=180)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report
