"""What runs again in the backward pass is found on the graph of a layer, whatever the model calls its parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.shard.regions import in_order, rerun_regions
from autopar.trace import trace

HEADS, LENGTH, WIDTH = 4, 8, 16


class Layer(nn.Module):
    """One function of queries, keys and values between linear layers."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor], groups: int = HEADS) -> None:
        super().__init__()
        self.mix, self.groups = mix, groups
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, groups * WIDTH // HEADS) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        merged: Tensor = self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return x + merged


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3)).masked_fill(
        torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1), -1e4
    )
    return F.dropout(scores.float().softmax(-1).to(q.dtype), 0.1) @ v


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
    return eager(q, k, v)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q) * k + v


def bilinear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q @ k.transpose(2, 3)).sum(-1, keepdim=True) * v


def cores(*layers: nn.Module) -> list[list[str]]:
    """Operators of each core of a model that runs `layers` one after the other, as one layer of the plan."""
    graph: OpGraph = trace(nn.Sequential(*layers), {"input": torch.zeros(2, LENGTH, WIDTH)}, compute_dtype="bfloat16")
    found = [(c, region) for c in graph.classes for region in rerun_regions(c, "selective")]
    return [[op.target.split(".")[1] for op in c.ops if op.name in region] for c, region in found]


CORE = ["matmul", "masked_fill", "to", "softmax", "to", "dropout", "matmul"]


@pytest.mark.parametrize(
    ("mix", "groups", "wanted"),
    [(eager, 4, [CORE]), (fused, 4, [["scaled_dot_product_attention"]]), (gated, 4, []), (bilinear, 4, [])],
)
def test_cores(mix: Callable[[Tensor, Tensor, Tensor], Tensor], groups: int, wanted: list[list[str]]) -> None:
    """From product to product, or the fused operator; a layer with no product of activations, or one, has no core."""
    found = [[name for name in core if name not in ("ones", "triu")] for core in cores(Layer(mix, groups))]
    assert found == wanted


def test_repeated_heads_belong_to_the_core() -> None:
    """Keys and values are kept as they were before each was repeated for two heads."""
    (core,) = cores(Layer(repeated, 2))
    assert core.count("flatten") == 2
    assert core.count("matmul") == 2


def test_two_attentions_are_two_cores() -> None:
    """A product with a parameter parts them."""
    assert [len(core) for core in cores(Layer(fused), Layer(fused))] == [1, 1]


def test_order_keeps_groups_together() -> None:
    """What a group reads moves in front of it, what reads it stays behind, and a group that something outside must
    interrupt has no order."""
    reads, makes = [("x",), ("a",), ("x",), ("a", "c"), ("b", "d")], [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert in_order(reads, makes, [[0, 3]]) == [2, 0, 3, 1, 4]
    assert in_order(reads, makes, []) == [0, 1, 2, 3, 4]
    assert in_order(reads, makes, [[0, 4]]) is None
