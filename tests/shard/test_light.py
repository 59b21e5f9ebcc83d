"""What is cheap to make again is chosen so that the fewest bytes are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import LayerClass, Op
from autopar.shard.light import connected, is_view, made_again
from autopar.shard.regions import rerun_regions
from autopar.trace import trace

WIDTH = 16
CHEAP = (
    "mul",
    "neg",
    "add",
    "silu",
    "gelu",
    "sigmoid",
    "tanh",
    "layer_norm",
    "rms_norm",
    "exp",
    "to",
    "softmax",
    "cat",
)


class Gated(nn.Module):
    """Products with elementwise ops and a norm between them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 1)
        self.wide = nn.Linear(2 * WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.wide(torch.cat([x, x * x], -1)))
        z: Tensor = self.down(self.wide(self.between(self.up(y), self.gate(y))))
        return z.mean()


BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gated": lambda a, b: a * F.silu(b),
    "summed": lambda a, b: torch.tanh(a + b) * torch.sigmoid(a),
    "chained": lambda a, b: (torch.exp(-a * a) * b).softmax(-1),
    "cast": lambda a, b: (a.double() * b.double()).float() * b,
}


def layers_of(name: str) -> Sequence[LayerClass]:
    """The layer classes of the model."""
    return trace(Gated(BETWEEN[name]), {"x": torch.zeros(2, WIDTH)}, compute_dtype="float32").classes


def kept(layer: LayerClass, again: Collection[str]) -> int:
    """Bytes kept for one sample if these ops run again: what they read and others save, but for their results."""
    made = {layer.root[r] for op in layer.ops if op.name in again for r in op.results}
    names: set[str] = set()
    inside = 0
    for op in layer.ops:
        names |= {layer.root[n] for n in (op.operands if op.name in again else op.saved.values)}
        inside += 0 if op.name in again else sum(spec.bytes_at(1) for spec in op.saved.extra)
    return inside + sum(layer.values[n].bytes_at(1) for n in names - made - {*layer.params, *layer.buffers})


@pytest.mark.parametrize("name", BETWEEN)
def test_fewest_bytes_are_kept(name: str) -> None:
    """No other set of cheap ops leaves fewer bytes, and no smaller one as few: all are tried."""
    saved = 0
    for layer in layers_of(name):
        ends = {layer.root[n] for n in layer.outputs}
        able = [op.name for op in layer.ops if _is_cheap(op) and ends.isdisjoint(layer.root[r] for r in op.results)]
        found = made_again(layer)
        assert found <= {*able}
        every = [(kept(layer, some), count) for count in range(len(able) + 1) for some in combinations(able, count)]
        assert (kept(layer, found), len(found)) == min(every)
        saved += kept(layer, ()) - kept(layer, found)
    assert saved > 0


def _is_cheap(op: Op) -> bool:
    return op.target.split(".")[1] in CHEAP and not is_view(op)


@pytest.mark.parametrize("name", BETWEEN)
def test_regions_hand_on_what_is_not_kept(name: str) -> None:
    """All that is made again is in regions, one for ops that hand values to one another; products are in none."""
    for layer in layers_of(name):
        regions = rerun_regions(layer, "light")
        assert frozenset().union(*regions) >= made_again(layer)
        assert len(regions) == len([*connected(layer, made_again(layer))])
        assert not any("linear" in name for region in regions for name in region)
