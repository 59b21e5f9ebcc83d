"""Dims that don't divide are split all the same, and exactly: real processes, float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cluster import Link, load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.emit.build import emit
from autopar.emit.example import random_batch
from autopar.emit.placements import lower_stage
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.shard.cuts import recuts
from autopar.shard.program import Call
from tests.integration.models import example, traced
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


@pytest.mark.parametrize(
    ("name", "batch", "config", "microbatches"),
    [
        ("gpt", 17, "dp=2,tp=2,microbatch_size=9,zero=1", 1),
        ("mlp", 18, "dp=4,microbatch_size=2,zero=2", 3),
        ("deep gpt", 18, "dp=2,pp=2,microbatch_size=5,schedule=gpipe", 2),
        pytest.param("gpt eager", 18, "dp=4,microbatch_size=2", 3, marks=pytest.mark.slow),
        pytest.param("cnn", 17, "dp=4,microbatch_size=5", 1, marks=pytest.mark.slow),
        pytest.param("gpt", 17, "dp=4,microbatch_size=5,zero=3,recompute=full", 1, marks=pytest.mark.slow),
        pytest.param("bert", 18, "dp=4,microbatch_size=2,zero=3", 3, marks=pytest.mark.slow),
        pytest.param("deep llama", 18, "dp=2,pp=2,microbatch_size=1,zero=1", 9, marks=pytest.mark.slow),
    ],
)
def test_odd_batches(pool: Pool, name: str, batch: int, config: str, microbatches: int) -> None:
    """Ranks with unequal rows of each microbatch, of 6 over 4 ranks the last with none: losses that are means over
    targets that count, dropout's masks, running statistics and pipelines included."""
    record = planned(traced(name), config, batch)
    assert record.num_microbatches == microbatches
    verified(pool, record, name)


def train_on(record: PlanRecord, graph: OpGraph, deal: str) -> tuple[int, float, float]:
    """Rows, loss and norm of the gradients of a step on rows dealt in some way."""
    model, inputs = example("mlp")
    pm = emit(record, graph, model, device="cpu")
    examples = [*inputs.values()]
    whole = dict(zip(graph.inputs, random_batch(graph, examples, 17, 0, torch.device("cpu")), strict=True))
    rank, ways = pm.data_parallel_rank or 0, pm.data_parallel_size
    own = pm.data_parallel_rows()
    assert own is not None
    rows = {
        "plan": whole["x"].new_tensor(own, dtype=torch.long), "strides": torch.arange(17)[rank::ways],
        "even": torch.arange(17).tensor_split(ways)[rank], "one": torch.arange(17 if rank == 0 else 0),
    }[deal]  # fmt: skip
    loss = pm.train_step(**{n: t[rows] for n, t in whole.items()})
    return len(rows), float(loss), float(pm.clip_grad_norm_(1.0))


def test_rows_may_be_dealt_in_any_way(pool: Pool) -> None:
    """Whatever rows the ranks are given, together they are the batch: loss and gradients are those of all 17."""
    record = planned(traced("mlp"), "dp=4,microbatch_size=5", 17)
    told = {deal: pool.run(4, train_on, record, traced("mlp"), deal) for deal in ("plan", "strides", "even", "one")}
    assert [[rows for rows, *_ in each] for each in told.values()] == [
        [5, 5, 5, 2], [5, 4, 4, 4], [5, 4, 4, 4], [17, 0, 0, 0],
    ]  # fmt: skip
    assert len({round(loss, 12) for each in told.values() for _, loss, _ in each}) == 1
    assert len({round(norm, 12) for each in told.values() for *_, norm in each}) == 1
