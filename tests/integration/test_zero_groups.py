"""ZeRO over a part of the replicas (hybrid sharding): real processes, float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Link, load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.emit.build import emit
from autopar.emit.parameters import local
from autopar.formulate.planner import Planner
from autopar.plan import POLICIES, PlanRecord, Request
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.integration.test_pipelines import check
from tests.pool import Pool

BATCH = 16
SLOW = pytest.mark.slow


def record_of(name: str, text: str) -> PlanRecord:
    """A plan of one stage, or of two where text has two parts."""
    graph, parts = traced(name), tuple(text.split("|"))
    ranks = 4 // len(parts) if "dp=4" not in text else 4
    if len(parts) == 1:
        return one_stage(graph, text, ranks, BATCH)
    return staged(graph, parts, (3, len(graph.layers) - 3), "1f1b", 4, ranks, BATCH)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep llama", "dp=4,zero=3,zero_group=2,microbatch_size=4"),
        ("deep gpt", "dp=4,zero=1,zero_group=2,microbatch_size=2"),
        pytest.param("deep gpt", "dp=4,zero=2,zero_group=2,recompute=full,microbatch_size=1", marks=SLOW),
        pytest.param("deep vit", "dp=4,zero=3,zero_group=1,microbatch_size=4", marks=SLOW),
        pytest.param("deep llama", "dp=4,zero=3,zero_group=2|dp=4,zero=2,zero_group=2", marks=SLOW),
        pytest.param("deep gpt", "dp=4,zero=0,zero_group=2,layers=1-2:zero=3,microbatch_size=2", marks=SLOW),
    ],
)
def test_groups_are_exact(pool: Pool, name: str, text: str) -> None:
    """Loss, every gradient and the parameters after three AdamW steps equal those of one device to 1e-9."""
    record = record_of(name, text)
    report = pool.run(record.request.devices, check, record, traced(name), name, timeout_s=180)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report


@SLOW
def test_a_found_group_is_exact(pool: Pool) -> None:
    """Where nodes are joined by a slow network the search shards inside them, exactly as one device computes."""
    cluster = replace(load_cluster("2x2xa100-80gb"), inter=Link("slow", 1e7, 1e-6))
    request = Request(
        "test", cluster.name, "cpu", 4, BATCH, "fp64", POLICIES["fp64"], "adamw",
        constraints=("exclude=pp", "exclude=tp", "devices=4", "zero=3"),
    )  # fmt: skip
    record = Planner(traced("deep gpt"), cluster, RooflinePricer(cluster), request).plan()
    assert {s.zero_group for s in record.stages[0].strategies} == {2}
    report = pool.run(4, check, record, traced("deep gpt"), "deep gpt", timeout_s=180)[0]
    assert report["largest"] < 1e-9, report


def stored(name: str, record: PlanRecord) -> int:
    """Bytes of parameters that a rank stores."""
    pm = emit(record, traced(name), example(name)[0], device="cpu")
    return sum(local(p.detach()).nbytes for p in pm.parameters())


def test_a_group_holds_the_model_once(pool: Pool) -> None:
    """Over groups of two a rank stores half of the parameters, as predicted, over all four a quarter."""
    for text, ways in (("dp=4,zero=3,zero_group=2", 2), ("dp=4,zero=3", 4)):
        record = record_of("deep llama", text)
        whole = sum(p.nbytes for p in example("deep llama")[0].parameters())
        assert pool.run(4, stored, "deep llama", record) == [whole // ways] * 4
        assert record.memory_by_category["parameters"] == whole // ways
