"""Attention under dropout written out, against the fused operator; random operators that can't be in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import LayerClass, OpGraph
from autopar.shard.rules import rule_for
from autopar.trace import trace
from autopar.trace.randomness import draws_whole
from tests.trace.interpreter import largest_difference

HEADS, LENGTH, WIDTH = 4, 6, 8


class Attention(nn.Module):
    """Attention under a `kind` of mask, its dropout set from outside."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        kv_heads = 2 if kind == "grouped heads" else HEADS
        self.q, self.k, self.v = (nn.Linear(5, h * WIDTH, bias=False) for h in (HEADS, kv_heads, kv_heads))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = torch.where(mask, 0.0, -2.0).to(q.dtype) if self.kind == "float mask" else None
        out = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask if self.kind == "bool mask" else bias,
            dropout_p=self.dropout,
            is_causal=self.kind == "causal",
            scale=0.3 if self.kind == "scale" else None,
            enable_gqa=self.kind == "grouped heads",
        )  # fmt: skip
        return out.pow(2).mean()


def inputs(batch: int) -> dict[str, Tensor]:
    """The first query of the first sample may see no key at all."""
    generator = torch.Generator().manual_seed(batch)
    mask = torch.rand(batch, 1, LENGTH, LENGTH, generator=generator) > 0.4
    mask[0, 0, 0] = False
    return {"x": torch.randn(batch, LENGTH, 5, generator=generator, dtype=torch.float64), "mask": mask}


def without_dropout(graph: OpGraph) -> OpGraph:
    def quiet(kind: LayerClass) -> LayerClass:
        ops = (replace(o, args=(o.args[0], 0.0, True)) if "dropout" in o.target else o for o in kind.ops)
        return replace(kind, ops=tuple(ops))

    return replace(graph, classes=tuple(map(quiet, graph.classes)))


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped heads", "bool mask", "float mask", "scale"])
def test_written_out_attention_is_attention(kind: str) -> None:
    """But for its dropout it computes what the fused operator does: loss and gradients, at another batch size."""
    torch.manual_seed(0)
    graph = trace(Attention(kind, 0.5).double(), inputs(2))
    targets = [op.target for c in graph.classes for op in c.ops]
    assert "aten.scaled_dot_product_attention.default" not in targets
    assert targets.count("aten.dropout.default") == 1
    assert any("attention with dropout" in a for a in graph.assumptions)
    torch.manual_seed(1)
    model, batch = Attention(kind, 0.0).double(), inputs(3)
    assert largest_difference(without_dropout(graph), model, batch, model(**batch), 3) < 1e-12


def test_attention_without_dropout_stays_fused() -> None:
    """Nothing is written out, or assumed, where attention drops nothing."""
    graph = trace(Attention("causal", 0.0), inputs(2))
    assert [op.target for c in graph.classes for op in c.ops].count("aten.scaled_dot_product_attention.default") == 1
    assert not graph.assumptions


class DropPath(nn.Module):
    """Drops whole samples, with numbers drawn in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5)


class Noisy(nn.Module):
    """Adds noise that it draws itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("module", "operator"),
    [(Noisy(), "aten.randn"), (DropPath(), "bernoulli"), (nn.Dropout2d(0.5), "dropout"), (nn.RReLU(), "aten.rrelu")],
)
def test_operators_that_draw_are_whole(module: nn.Module, operator: str) -> None:
    """Numbers drawn in a way that ranks could not agree on piece by piece: no rule splits it, nor does time."""
    graph = trace(nn.Sequential(nn.Conv2d(2, 3, 1), module), (torch.zeros(2, 2, 4, 4),), loss_fn=lambda out: out.mean())
    (drawing,) = [(op, kind) for kind in graph.classes for op in kind.ops if draws_whole(op)]
    assert operator in drawing[0].target
    assert rule_for(*drawing) is None
    assert "draws the random numbers of all samples" in graph.why_not_separable


@pytest.mark.parametrize("module", [nn.Dropout2d(0.5), nn.RReLU(), nn.Dropout(0.5)])
def test_random_operators_that_draw_nothing_pass(module: nn.Module) -> None:
    """In eval mode nothing is drawn."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), module).eval()
    assert trace(model, (torch.zeros(2, 2, 4, 4),), loss_fn=lambda out: out.mean()).loss
