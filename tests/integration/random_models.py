"""Small random models, and random legal strategies for them: a few numbers say which."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import BROADCAST, REPLICATE, Extent, Layout, OpGraph, TensorSpec, is_dealt
from autopar.plan import LayerStrategy, PlanRecord
from autopar.shard.rules import assignments, rule_for
from tests.emit.handmade import mesh_of, record_of

# ruff: noqa: ARG001, ARG005 - steps are called alike


@dataclass(frozen=True)
class Recipe:
    """A model: the steps it makes of x (samples, length, heads * 3), one after the other, and its loss."""

    steps: tuple[str, ...]
    length: int
    heads: int
    loss: str

    @property
    def width(self) -> int:
        """Features of x."""
        return 3 * self.heads


class Model(nn.Module):
    """What a recipe says."""

    order: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        width, length = recipe.width, recipe.length
        sizes = {"linear": width, "rows": width, "heads": 3 * width, "einsum": width, "glu": 2 * width}
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(sizes.get(s, width), width)) for s in recipe.steps)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(sizes.get(s, width))) for s in recipe.steps)
        self.register_buffer("order", torch.randperm(length, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for step, weight, bias in zip(self.recipe.steps, self.weights, self.biases, strict=True):
            x = STEPS[step](self, x, weight, bias)
        return LOSSES[self.recipe.loss](x, y)


def _heads(model: Model, x: Tensor, w: Tensor, b: Tensor, causal: bool) -> Tensor:
    q, k, v = F.linear(x, w, b).unflatten(2, (3, model.recipe.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def _scatter(model: Model, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    places = x.argsort(dim=2)
    return torch.zeros_like(x).scatter_add(2, places, x * w[0]) + b


STEPS: dict[str, Callable[[Model, Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda m, x, w, b: F.gelu(F.linear(x, w, b)),
    "residual": lambda m, x, w, b: x + torch.tanh(x @ w) * b,
    "rows": lambda m, x, w, b: F.linear(x.reshape(-1, x.shape[2]), w, b).view(x.shape),
    "norm": lambda m, x, w, b: F.layer_norm(x, w.shape[:1], w[0], b),
    "heads": lambda m, x, w, b: _heads(m, x, w, b, causal=False),
    "causal": lambda m, x, w, b: _heads(m, x, w.repeat(3, 1), b.repeat(3), causal=True),
    "softmax": lambda m, x, w, b: x.softmax(1) * b + x,
    "cumsum": lambda m, x, w, b: x.cumsum(1) * b,
    "mean": lambda m, x, w, b: x - x.mean(1, keepdim=True) * b,
    "halves": lambda m, x, w, b: torch.cat(tuple(reversed(x.split((1, x.shape[2] - 1), dim=2))), 2) * b,
    "turned": lambda m, x, w, b: (F.linear(x, w).transpose(1, 2) * 0.5).transpose(1, 2) + b,
    "convolved": lambda m, x, w, b: F.conv1d(x.transpose(1, 2), w.unsqueeze(2), b).transpose(1, 2),
    "picked": lambda m, x, w, b: x.index_select(1, m.order) * b,
    "indexed": lambda m, x, w, b: x[:, m.order] + w.diagonal(),
    "padded": lambda m, x, w, b: F.pad(x, (0, 0, 1, 0))[:, :-1] * b + x,
    "largest": lambda m, x, w, b: x + x.amax(2, keepdim=True) * b,
    "scattered": _scatter,
    "einsum": lambda m, x, w, b: torch.einsum("bsk,nk->bsn", x, w) + torch.einsum("bsk,btk->bst", x, x).sum(2, True),
    "glu": lambda m, x, w, b: F.glu(F.linear(x, w, b), 2),
    "batched": lambda m, x, w, b: torch.bmm(x, x.transpose(1, 2).softmax(2)) @ (x * b),
}
"""Steps by name; shapes stay as they are."""

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y: F.mse_loss(x, y),
    "sum": lambda x, y: (x * y).sum(),
    "classes": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.argmax(2).flatten()),
    "of samples": lambda x, y: (x * y).mean((1, 2)).logsumexp(0),
}
"""Losses by name, of two tensors of one shape."""


def example(recipe: Recipe) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64 with random parameters, and example inputs: the same on every process."""
    generator = torch.Generator().manual_seed(1)
    model = Model(recipe).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    shape = (2, recipe.length, recipe.width)
    return model, {name: torch.zeros(shape, dtype=torch.float64) for name in ("x", "y")}


def random_plan(graph: OpGraph, sizes: tuple[int, ...], batch: int, seed: int) -> PlanRecord:
    """Random factors for most operators, storage of parameters, changes of layout and layouts at cuts."""
    rng = random.Random(seed)
    cuts = [_layout(rng, graph.values[cut.main], sizes, batch, (REPLICATE,)) for cut in graph.cuts]

    def strategy(index: int) -> LayerStrategy:
        layer = graph.classes[graph.layers[index].class_index]
        ops, relays = {}, {}
        for op in layer.ops:
            rule = rule_for(op, layer)
            if rule and rng.random() < 0.9:
                ops[op.name] = rng.choice(assignments(rule, op, layer, sizes, batch))
        for name in (*layer.params, *(n for n in layer.producer if rng.random() < 0.1)):
            spec = layer.values[name]
            others = (REPLICATE, BROADCAST) if spec.requires_grad else (REPLICATE,)
            relays[name] = _layout(rng, spec, sizes, batch, others)
        return LayerStrategy(cuts[index], cuts[index + 1], ops, relays)

    made = [strategy(i) for i in range(len(graph.layers))]
    return record_of(graph, mesh_of(*sizes), made.__getitem__, global_batch=batch)


def _layout(rng: random.Random, spec: TensorSpec, sizes: Sequence[int], batch: int, others: Sequence[int]) -> Layout:
    """A random layout in which every rank has a part of what is split, or it divides."""
    found: list[int] = []
    for size in sizes:
        ways = {d: size * prod(s for p, s in zip(found, sizes, strict=False) if p == d) for d in range(len(spec.shape))}
        dealt = [d for d, n in ways.items() if spec.shape[d] != Extent(0, 1) and is_dealt(spec.shape[d], batch, n)]
        found.append(rng.choice([*dealt, *others]))
    return tuple(found)
