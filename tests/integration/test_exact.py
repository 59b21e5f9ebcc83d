"""Every kind of plan computes what the model computes on one device: real processes, float64."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.verify import VerifyReport, verify
from tests.integration.models import example, traced
from tests.pool import Pool

GLOBAL_BATCH = 16
CONFIGS = {
    "dp": "dp=4",
    "zero1": "dp=4,zero=1",
    "zero2": "dp=4,zero=2",
    "zero3": "dp=4,zero=3",
    "tp": "tp=4",
    "tp+sp": "tp=4,sp=1",
    "tp x dp": "dp=2,tp=2",
    "tp x zero3": "dp=2,tp=2,zero=3",
    "mix": "dp=2,tp=2,layers=0:tp=4;1:tp=1+zero=3",
    "2 axes of tp": "tp=4,layers=1:tp=2",
}


def planned(graph: OpGraph, text: str, dtype: str = "fp64", devices: int = 4) -> PlanRecord:
    """The plan of a written configuration."""
    cluster = load_cluster(f"{devices}xa100-80gb")
    request = Request("test", cluster.name, "cpu", devices, GLOBAL_BATCH, dtype, POLICIES[dtype], "adamw")
    return Planner(graph, cluster, RooflinePricer(cluster), request).plan(ManualConfig.parse(text))


def check(record: PlanRecord, graph: OpGraph, name: str) -> dict[str, Any]:
    """On a rank: verify the plan."""
    model, inputs = example(name)
    report: VerifyReport = verify(record, model, inputs, graph=graph)
    return report.to_json()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama"])
def test_plan_is_exact(pool: Pool, name: str, config: str, recompute: str, microbatches: int) -> None:
    """Loss, every gradient and the parameters after three AdamW steps equal those of one device to 1e-9."""
    text = CONFIGS[config]
    dp = ManualConfig.parse(text).dp
    size = GLOBAL_BATCH // (dp * microbatches)
    record = planned(traced(name), f"{text},microbatch_size={size},recompute={recompute}")
    assert record.num_microbatches == microbatches
    report = pool.run(4, check, record, traced(name), name)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report
