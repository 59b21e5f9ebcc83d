"""Dropout inside attention: the same masks on all ranks and when recomputed, none in evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.build import emit
from autopar.graph import OpGraph
from autopar.trace.capture import trace
from autopar.verify import verify
from tests.emit.handmade import data_parallel, record_of
from tests.integration.test_exact import planned
from tests.pool import Pool

LENGTH, WIDTH = 4, 16


class Block(nn.Module):
    """Causal self-attention with dropout on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = 0.4 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + merged


class Model(nn.Module):
    """Two blocks under a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


@cache
def example() -> tuple[Model, OpGraph]:
    torch.manual_seed(0)
    model = Model().double()
    return model, trace(model, {"x": torch.zeros(2, LENGTH, WIDTH)}, compute_dtype="float64")


def batch() -> Tensor:
    return torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def trained(recompute: str, seed: int = 0) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss and gradients of a step on one device, and the loss in evaluation."""
    model, graph = example()
    record = record_of(
        graph, (), lambda i: data_parallel(graph, i, (), recompute=recompute), global_batch=8, num_microbatches=2
    )
    pm = emit(replace(record, request=replace(record.request, seed=seed)), graph, model, device="cpu")
    loss = pm.train_step(x=batch())
    gradients = {n: p.grad.clone() for n, p in pm.named_parameters() if p.grad is not None}
    first, again = pm.eval_step(x=batch()), pm.eval_step(x=batch())
    assert torch.equal(first, again)
    return loss, gradients, first


@pytest.mark.parametrize("recompute", ["light", "selective", "full"])
def test_recomputation_draws_the_same_masks(recompute: str) -> None:
    """Loss and gradients under recomputation are those without; another seed drops others."""
    loss, gradients, _ = trained("none")
    recomputed_loss, recomputed, _ = trained(recompute)
    torch.testing.assert_close(recomputed_loss, loss, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-11, atol=1e-14)
    assert not torch.allclose(trained("none", seed=1)[0], loss, rtol=1e-6)


def test_evaluation_drops_nothing() -> None:
    """The loss in evaluation is the model's own in eval mode."""
    model = example()[0].eval()
    try:
        torch.testing.assert_close(trained("none")[2], model(batch()), rtol=1e-12, atol=0)
    finally:
        model.train()


def check(text: str, devices: int) -> dict[str, Any]:
    model, graph = example()
    record = planned(graph, text, devices=devices)
    return verify(record, model, {"x": torch.zeros(2, LENGTH, WIDTH)}, graph=graph).to_json()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "config", ["dp=2,microbatch_size=4", "tp=2,microbatch_size=8", "dp=2,zero=3,microbatch_size=8"]
)
def test_replicas_draw_the_same_masks(pool: Pool, config: str, recompute: str) -> None:
    """Split over samples or heads, two ranks compute what one does that draws the same masks."""
    report = pool.run(2, check, f"{config},recompute={recompute}", 2)[0]
    assert "drops out" in report["reference"]
    assert report["largest"] < 1e-9, report
