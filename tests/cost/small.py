"""A small residual feed-forward layer, written down by hand, and the same in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.cluster import Cluster, Device, Link
from autopar.graph import Extent, LayerClass, Op, Ref, Saved, TensorSpec

ROWS, WIDTH, HIDDEN = 24, 16, 64


def device(**changes: object) -> Device:
    """A device with round figures and no inefficiency."""
    figures: dict[str, object] = {
        "name": "round", "backend": "cuda", "memory_bytes": 10**10, "usable_bytes": 9 * 10**9, "reserve_bytes": 10**8,
        "peak_flops_per_s": {"float32": 1e12, "bfloat16": 4e12}, "memory_bytes_per_s": 1e11,
        "efficiency": {"float32": 1.0, "bfloat16": 1.0, "memory": 0.5}, "launch_s": 1e-6,
    }  # fmt: skip
    return Device(**(figures | changes))  # type: ignore[arg-type]


def cluster(nodes: int = 2, per_node: int = 4) -> Cluster:
    """Nodes joined by a link ten times slower than the one inside."""
    return Cluster("small", device(), nodes, per_node, Link("near", 1e10, 1e-6), Link("far", 1e9, 1e-5))


def _spec(*shape: Extent | int, grad: bool = True) -> TensorSpec:
    return TensorSpec(tuple(e if isinstance(e, Extent) else Extent(0, e) for e in shape), "float32", grad)


def feed_forward() -> LayerClass:
    """out = x + gelu(x @ up.T) @ down.T with x of (batch, ROWS, WIDTH)."""
    batch = Extent(1)
    wide, narrow = _spec(batch, ROWS, HIDDEN), _spec(batch, ROWS, WIDTH)
    values = {
        "x": narrow, "up": _spec(HIDDEN, WIDTH), "down": _spec(WIDTH, HIDDEN),
        "h": wide, "a": wide, "y": narrow, "out": narrow,
    }  # fmt: skip
    ops = (
        _op("first", "aten.linear.default", ("x", "up"), "h", ("x", "up")),
        _op("act", "aten.gelu.default", ("h",), "a", ("h",)),
        _op("second", "aten.linear.default", ("a", "down"), "y", ("a", "down")),
        _op("sum", "aten.add.Tensor", ("x", "y"), "out", ()),
    )
    return LayerClass(("x",), ("up", "down"), (), ops, ("out",), values)


def _op(name: str, target: str, operands: tuple[str, ...], result: str, saved: tuple[str, ...]) -> Op:
    return Op(name, target, tuple(Ref(o) for o in operands), (), (result,), (None,), Saved(saved))


class FeedForward(nn.Module):
    """The layer of `feed_forward` in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """x of (batch, ROWS, WIDTH) to the same shape."""
        h = nn.functional.linear(x, self.up)
        a = nn.functional.gelu(h)
        y = nn.functional.linear(a, self.down)
        return x + y
