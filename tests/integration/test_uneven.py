"""Dims that don't divide are split all the same, and exactly: real processes, float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import Link, load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.emit.stage import lower_stage
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.shard.cuts import recuts
from autopar.shard.program import Call
from tests.integration.models import traced
from tests.integration.test_exact import check
from tests.pool import Pool


def planned(graph: OpGraph, text: str, batch: int, devices: int = 4) -> PlanRecord:
    """The plan of a written configuration where sending costs next to nothing, so that all is split that can be."""
    cluster = replace(load_cluster(f"{devices}xa100-80gb"), intra=Link("wonder", 1e15, 1e-12))
    request = Request("test", cluster.name, "cpu", devices, batch, "fp64", POLICIES["fp64"], "adamw")
    return Planner(graph, cluster, RooflinePricer(cluster), request).plan(ManualConfig.parse(text))


def calls(record: PlanRecord, graph: OpGraph) -> list[tuple[Call, int]]:
    """The calls of a plan's layers, with how many dims are recut for each."""
    (stage,) = record.stages
    programs = {id(p): p for p in lower_stage(graph, stage)}.values()
    batch = record.global_microbatch
    return [(s, len(recuts(s, p, batch))) for p in programs for s in p.steps if isinstance(s, Call)]


def verified(pool: Pool, record: PlanRecord, name: str) -> None:
    """Loss, every gradient and the parameters after three AdamW steps equal those of one device to 1e-9."""
    report: dict[str, Any] = pool.run(4, check, record, traced(name), name)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report


@pytest.mark.parametrize(
    "config",
    [
        "tp=4,microbatch_size=8",
        "dp=2,tp=2,microbatch_size=2,zero=1,recompute=full",
        pytest.param("dp=2,tp=2,microbatch_size=4,zero=3", marks=pytest.mark.slow),
        pytest.param("tp=4,sp=1,microbatch_size=4,recompute=selective", marks=pytest.mark.slow),
    ],
)
def test_odd_vocabulary_and_heads(pool: Pool, config: str) -> None:
    """67 words and 6 heads on 4 ranks (on 2, 3 heads each): the search splits them, and what it makes is exact."""
    record = planned(traced("odd gpt"), config, 8)
    found = calls(record, traced("odd gpt"))
    split = {call.op.target: set(call.factors) for call, _ in found if set(call.factors) != {""}}
    assert "v" in split["aten.cross_entropy_loss.default"] or "zero=3" in config
    assert "d1" in split["aten.scaled_dot_product_attention.default"]
    assert any(count for _, count in found) == ("tp=4" in config)
    verified(pool, record, "odd gpt")
