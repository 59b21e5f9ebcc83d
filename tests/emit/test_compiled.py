"""Layers under `torch.compile` compute what they do without it: real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.emit.build import emit
from autopar.graph import OpGraph
from autopar.measure.local import local_cluster
from autopar.plan import PlanRecord
from tests.emit.test_pipeline import batch, rows, whole
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.pool import Pool


def difference(record: PlanRecord, graph: OpGraph, name: str, options: dict[str, Any]) -> float:
    """By how much losses and gradients differ at most, relative to the largest of their kind."""
    made: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        pm, full = emit(record, graph, example(name)[0], device="cpu"), batch(name)
        if compiled:
            pm.compile(**options)
        losses = [pm.train_step(**rows(pm, full)), pm.train_step(**rows(pm, full)), pm.eval_step(**rows(pm, full))]
        made.append([torch.stack(losses), *(whole(p.grad) for p in pm.parameters() if p.grad is not None)])
        graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        assert bool(graphs) == compiled
    plain, ours = made
    assert len(plain) == len(ours) > 1
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in zip(plain, ours, strict=True))


PLANS = [
    "dp=2",
    "tp=2",
    "dp=2,zero=3,recompute=full",
    "dp=2,recompute=light",
    "tp=2,sp=1,recompute=selective,microbatch_size=4",
    "1f1b",
    "zbv",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", PLANS)
def test_compiled_layers(pool: Pool, text: str) -> None:
    """Under data, tensor and sequence parallelism, ZeRO, recomputation and pipelines, also of a split backward pass."""
    graph = traced("deep gpt")
    if text == "zbv":
        plan = staged(graph, ("dp=1",) * 2, (2, 1, 1, 2), "zbv", 4)
    elif text == "1f1b":
        plan = staged(graph, ("dp=1",) * 2, (3, 3), "1f1b", 4)
    else:
        plan = one_stage(graph, text, 2, 16)
    assert max(pool.run(2, difference, plan, graph, "deep gpt", {"backend": "aot_eager"})) < 1e-12


@pytest.mark.slow
def test_inductor(pool: Pool) -> None:
    """Code that torch generates for a layer's shards, fused, is as exact."""
    plan = one_stage(traced("deep gpt"), "tp=2", 2, 16)
    assert max(pool.run(2, difference, plan, traced("deep gpt"), "deep gpt", {}, timeout_s=280)) < 1e-12


def test_one_device() -> None:
    """`optimize(compile=...)`, and `torch.compile` of the module itself, give the loss and gradients of the model."""
    (model, inputs), record = example("mlp"), one_stage(traced("mlp"), "dp=1", 1, 16)
    here = replace(record.fingerprint, device=local_cluster(torch.device("cpu")).device.name)
    options: dict[str, Any] = {"backend": "aot_eager"}
    pm = autopar.optimize(model, inputs, replace(record, fingerprint=here), compile=options)
    batch = {"x": torch.randn(16, 16, dtype=torch.float64), "labels": torch.arange(16) % 8}
    wanted = torch.autograd.grad(loss := model(**batch), list(model.parameters()))
    torch.testing.assert_close(pm.train_step(**batch), loss.detach(), rtol=1e-12, atol=0)
    pm.zero_grad()
    torch.compile(pm, **options)(**batch).backward()
    torch.testing.assert_close([p.grad for p in pm.parameters()], list(wanted), rtol=1e-12, atol=1e-15)
