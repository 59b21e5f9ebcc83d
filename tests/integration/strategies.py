"""Models for which one way of splitting is the fastest where links are slow, and what was done in the plans found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import Cluster, Link
from autopar.cost.pricer import CollectiveTimes, OpTimes
from autopar.cost.work import work
from autopar.formulate.planner import Planner
from autopar.graph import CollectiveKey, OpGraph, OpKey
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.shard.lower import lower_layer
from autopar.shard.program import Program, Relayout
from autopar.trace.capture import trace
from tests.cost.small import device

FLOPS_PER_S, BYTES_PER_S, FAST_MEMORY, SLOW_MEMORY = 1e9, 2e8, 1e12, 1e9
"""Rates at which splitting any product pays, whatever is then sent; splitting all else only where nothing is, with a
memory so fast, and with a slow one also where nothing more is."""


class Attention(nn.Module):
    """Causal attention with a residual, then a feed-forward pair with one."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        size = width // heads
        self.counts = (heads, kv_heads, kv_heads)
        self.qkv = nn.ModuleList(nn.Linear(width, n * size, bias=False) for n in self.counts)
        self.out = nn.Linear(width, width, bias=False)
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        split = (lin(normed).unflatten(2, (n, -1)) for lin, n in zip(self.qkv, self.counts, strict=True))
        q, k, v = (t.transpose(1, 2) for t in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.again(x))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Blocks of attention between an embedding and a head over a vocabulary."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, vocab: int, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Attention(width, heads, kv_heads, inner) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Square(nn.Module):
    """Square layers with what is not linear between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


class Experts(nn.Module):
    """Tokens sent to the expert that scores them highest, as many as it has room for (GShard)."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.zeros(experts, width, inner))
        self.down = nn.Parameter(torch.zeros(experts, inner, width))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        scores = self.gate(x).softmax(-1)
        room = 2 * x.shape[1] // scores.shape[-1]
        chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(x.dtype)
        place = ((chosen.cumsum(1) - 1) * chosen).sum(-1).long()
        sent = chosen.unsqueeze(-1) * F.one_hot(place, x.shape[1])[..., :room].unsqueeze(2).to(x.dtype)
        inside = torch.einsum("btd,btec->becd", x, sent)
        made = torch.einsum("becf,efd->becd", torch.einsum("becd,edf->becf", inside, self.up).relu(), self.down)
        weighted = sent * (scores * chosen).sum(-1)[..., None, None]
        return F.mse_loss(self.behind(x + torch.einsum("becd,btec->btd", made, weighted)), target)


def _tokens(length: int, *names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(2, length, dtype=torch.long) for name in names}


def _rows(*shape: int) -> dict[str, Tensor]:
    return {name: torch.zeros(2, *shape, dtype=torch.float64) for name in ("x", "target")}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "wide": (lambda: Language(48, 4, 4, 192, 96), lambda: _tokens(8, "ids", "labels")),
    "wide, longer": (lambda: Language(48, 4, 4, 192, 96), lambda: _tokens(32, "ids", "labels")),
    "words": (lambda: Language(16, 4, 4, 16, 4096, tied=True), lambda: _tokens(8, "ids", "labels")),
    "long": (lambda: Language(16, 4, 4, 16, 16), lambda: _tokens(256, "ids", "labels")),
    "long, one head": (lambda: Language(16, 1, 1, 16, 16), lambda: _tokens(256, "ids", "labels")),
    "two heads": (lambda: Language(48, 2, 2, 192, 96), lambda: _tokens(32, "ids", "labels")),
    "long, two heads": (lambda: Language(16, 2, 2, 64, 16), lambda: _tokens(128, "ids", "labels")),
    "square": (lambda: Square(144), lambda: _rows(144)),
    "experts": (lambda: Experts(16, 4, 256), lambda: _rows(64, 16)),
    "two experts": (lambda: Experts(16, 2, 64), lambda: _rows(64, 16)),
}
"""Small models by name: the module, and example inputs."""


def example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in float64 with random parameters, and example inputs: the same on every process."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    generator = torch.Generator().manual_seed(1)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, inputs()


@cache
def traced(name: str) -> OpGraph:
    """The trace of `example(name)`."""
    return trace(*example(name), compute_dtype="float64")


@dataclass(frozen=True)
class Volumes:
    """Prices by closed forms: products and passes over memory at a rate, collectives by what a rank of a ring sends."""

    cluster: Cluster
    memory_bytes_per_s: float
    assumptions: tuple[str, ...] = ()

    def identity(self) -> str:
        """What the prices depend on."""
        return f"volumes {self.memory_bytes_per_s}"

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """FLOPs of products, bytes of all else."""
        works = [work(key) for key in keys]
        passes = ([w.forward for w in works], [w.backward for w in works])
        forward, backward = (
            np.array([p.flops / FLOPS_PER_S or p.bytes / self.memory_bytes_per_s for p in each]) for each in passes
        )
        return OpTimes(forward, backward, ["roofline"] * len(keys))

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """An all-reduce sends what it reduces almost twice, others once."""
        sent = [k.bytes * (1 - 1 / k.ranks) * (2 if k.kind == "all_reduce" else 1) for k in keys]
        return CollectiveTimes(np.array(sent) / BYTES_PER_S, ["roofline"] * len(keys))


def planner_of(
    name: str, devices: int, batch: int, *, limit_bytes: int | None = None, memory_bytes_per_s: float = FAST_MEMORY
) -> Planner:
    """A planner of one stage where products and bytes sent are all that takes time."""
    link = Link("even", BYTES_PER_S, 0.0)
    where = Cluster("even", device(peak_flops_per_s={"float64": FLOPS_PER_S}), 1, devices, link, link)
    request = Request(
        name, where.name, "cpu", devices, batch, "fp64", POLICIES["fp64"], "sgd",
        constraints=("exclude=pp",), memory_limit_bytes=limit_bytes,
    )  # fmt: skip
    return Planner(traced(name), where, Volumes(where, memory_bytes_per_s), request)


def planned(
    name: str, devices: int, batch: int, *, limit_bytes: int | None = None, memory_bytes_per_s: float = FAST_MEMORY
) -> PlanRecord:
    """The fastest plan of such a planner."""
    return planner_of(name, devices, batch, limit_bytes=limit_bytes, memory_bytes_per_s=memory_bytes_per_s).plan()


def programs(record: PlanRecord, name: str) -> Iterator[tuple[str, Program]]:
    """Name and lowered program of each layer."""
    stage = record.stages[0]
    sizes = tuple(axis.size for axis in stage.mesh)
    for i, chosen in enumerate(stage.assignment):
        yield traced(name).layers[i].name, lower_layer(traced(name), i, stage.strategies[chosen], sizes)


def moved(program: Program, batch: int, forward: bool = True) -> Counter[tuple[str, int]]:
    """Collectives on activations in one direction: kind and elements of the whole value, by how often."""
    found: Counter[tuple[str, int]] = Counter()
    for step in program.steps:
        if isinstance(step, Relayout) and step.source not in program.params:
            size = prod(program.values[step.source].shape_at(batch))
            moves = step.forward if forward else step.backward
            found.update((m.kind, size) for m in moves if m.kind not in ("divide", "slice", "pad"))
    return found
