"""Pipelines compute what the model computes on one device: real processes, float64."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.verify import VerifyReport, verify
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.pool import Pool

CELLS: dict[str, tuple[int, tuple[str, ...], tuple[int, ...], str, int]] = {
    "pp 2": (1, ("dp=1", "dp=1"), (3, 3), "1f1b", 4),
    "pp 4 uneven": (1, ("dp=1",) * 4, (1, 2, 1, 2), "1f1b", 4),
    "pp 2 x tp 2": (2, ("tp=2", "tp=2"), (3, 3), "1f1b", 2),
    "pp 2 x zero-3 2": (2, ("dp=2,zero=3", "dp=2,zero=3"), (3, 3), "1f1b", 4),
    "pp 2, dp 2 then tp 2": (2, ("dp=2", "tp=2"), (3, 3), "gpipe", 4),
    "pp 2 x dp 4, another mesh": (4, ("dp=4", "dp=4,layers=0:tp=2"), (4, 2), "1f1b", 2),  # block 0 is of the other
    "interleaved 2 x 2": (1, ("dp=1", "dp=1"), (2, 1, 1, 2), "interleaved", 4),
    "zb 2 x zero-3 2": (2, ("dp=2,zero=3",) * 2, (3, 3), "zb", 4),
    "zb 2 x 2": (1, ("dp=1",) * 2, (2, 1, 1, 2), "zb", 8),
    "zbv 2 x tp 2": (2, ("tp=2",) * 2, (2, 1, 1, 2), "zbv", 2),
    "zbv, dp 2 then tp 2": (2, ("dp=2", "tp=2"), (2, 1, 1, 2), "zbv", 4),
    "dualpipev 2 x zero-2 2": (2, ("dp=2,zero=2",) * 2, (2, 1, 1, 2), "dualpipev", 4),
}
"""Ranks of a group, configuration of each group, layers of each stage (the last has all that are left), schedule,
microbatches."""


def _is_quick(name: str, cell: str, recompute: str) -> bool:
    """Which cases are tried whenever anything changes."""
    if cell.startswith(("zb", "dual")):
        return (name, cell, recompute) in SPLIT
    some = {"selective": SELECTIVE, "light": LIGHT}
    return name in QUICK and (recompute not in some or (name, cell) in some[recompute])


SPLIT = {
    ("deep gpt", "zb 2 x zero-3 2", "full"),
    ("deep gpt", "zb 2 x 2", "none"),
    ("deep llama", "zbv 2 x tp 2", "selective"),
    ("deep llama", "zb 2 x zero-3 2", "light"),
    ("skips", "zbv, dp 2 then tp 2", "light"),
    ("skips", "zbv, dp 2 then tp 2", "none"),
    ("deep llama", "dualpipev 2 x zero-2 2", "full"),
}

SELECTIVE = {("deep gpt", "pp 2 x tp 2"), ("deep gpt", "interleaved 2 x 2"), ("deep llama", "pp 2, dp 2 then tp 2")}
LIGHT = {("deep llama", "pp 2 x tp 2"), ("skips", "pp 2, dp 2 then tp 2"), ("deep gpt", "interleaved 2 x 2")}
QUICK = ("deep gpt", "deep llama", "skips")
CASES = [
    pytest.param(name, cell, recompute, marks=() if _is_quick(name, cell, recompute) else pytest.mark.slow)
    for name in (*QUICK, "deep bert", "deep vit", "cnn with groups")
    for cell in CELLS
    for recompute in ("none", "light", "full", "selective")
    # A tied parameter can't be whole in one stage and cut up in another: refused, see `tests/emit/test_pipeline.py`.
    if name not in ("deep gpt", "deep bert") or "dp 2 then tp 2" not in cell
]


def check(record: PlanRecord, graph: OpGraph, name: str) -> dict[str, Any]:
    """On a rank: verify the plan."""
    model, inputs = example(name)
    report: VerifyReport = verify(record, model, inputs, graph=graph)
    return report.to_json()


@pytest.mark.parametrize(("name", "cell", "recompute"), CASES)
def test_pipeline_is_exact(pool: Pool, name: str, cell: str, recompute: str) -> None:
    """Loss, every gradient and the parameters after three AdamW steps equal those of one device to 1e-9."""
    group_size, texts, counts, schedule, microbatches = CELLS[cell]
    graph = traced(name)
    texts = tuple(f"{text},recompute={recompute}" for text in texts)
    counts = (*counts[:-1], len(graph.layers) - sum(counts[:-1]))
    record = staged(graph, texts, counts, schedule, microbatches, group_size)
    report = pool.run(group_size * len(texts), check, record, graph, name)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report


PLANNED = {
    "pp 2 x dp 2": "pp=2,dp=2,microbatch_size=2",
    "pp 2 uneven x dp 2": "pp=2,dp=2,microbatch_size=4,stage_layers=1/3",
    "pp 2 x tp 2": "pp=2,tp=2,microbatch_size=4",
    "pp 2 x zero-3 2": "pp=2,dp=2,zero=3,microbatch_size=2,recompute=full",
    "interleaved 2 x 2 x zero-2 2": "pp=2,virtual_stages=2,dp=2,zero=2,schedule=interleaved,microbatch_size=2",
    "zbv x zero-1 2": "pp=2,dp=2,zero=1,schedule=zbv,microbatch_size=2",
    "gpipe x sequence": "pp=2,tp=2,sp=1,schedule=gpipe,microbatch_size=4",
}


@pytest.mark.parametrize("text", PLANNED.values(), ids=PLANNED)
@pytest.mark.parametrize("name", ["deep gpt", "deep llama", "skips"])
def test_planned_pipeline_is_exact(pool: Pool, name: str, text: str) -> None:
    """Pipelines that the planner makes of a written configuration fit together at the cuts, and are exact."""
    graph = traced(name)
    report = pool.run(4, check, one_stage(graph, text, 4, 16), graph, name)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report
