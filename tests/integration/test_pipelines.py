"""Pipelines compute what the model computes on one device: real processes, float64."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.verify import VerifyReport, verify
from tests.integration.models import example, traced
from tests.integration.staged import staged
from tests.pool import Pool


def check(record: PlanRecord, graph: OpGraph, name: str) -> dict[str, Any]:
    """On a rank: verify the plan."""
    model, inputs = example(name)
    report: VerifyReport = verify(record, model, inputs, graph=graph)
    return report.to_json()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_two_stages(pool: Pool, name: str, schedule: str) -> None:
    """GPipe and 1F1B over two devices."""
    graph = traced(name)
    layers = len(graph.layers)
    record = staged(graph, ("dp=1", "dp=1"), (layers // 2, layers - layers // 2), schedule, 4)
    report = pool.run(2, check, record, graph, name)[0]
    assert report["largest"] < 1e-9, report
