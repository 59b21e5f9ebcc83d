"""One graph of a symbolic batch from two of given batches: what grows between them is a linear function of the batch.

For models that ask for the batch as a plain number (`len(x)`), under which it can't be a symbol. What the two graphs
don't have in common makes the model depend on the batch in other ways, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.graph import Extent, Op, TensorSpec
from autopar.trace.flat import BlockCall, Flat, Item
from autopar.trace.sizes import NotLinearError

SIZES = (211, 223)
"""The batches that are compared: primes that hardly divide another size."""


def blended(small: Flat, large: Flat) -> Flat:
    """The graph whose sizes at the two batches of `SIZES` are those of `small` and `large`.

    Raises NotLinearError naming the first thing that is not the same or does not grow evenly.
    """
    if len(small.items) != len(large.items) or small.outputs != large.outputs:
        raise NotLinearError(f"{len(small.items)} operators at batch {SIZES[0]}, {len(large.items)} at {SIZES[1]}")
    blend = _Blend()
    items = tuple(blend.item(a, b) for a, b in zip(small.items, large.items, strict=True))
    values = {name: blend.spec(name, spec, large.values[name]) for name, spec in small.values.items()}
    return replace(small, items=items, values=values)


@dataclass(frozen=True)
class _Blend:
    def item(self, a: Item, b: Item) -> Item:
        if isinstance(a, Op) and isinstance(b, Op) and (a.target, a.results) == (b.target, b.results):
            return replace(a, args=self.argument(a, a.args, b.args), kwargs=self.argument(a, a.kwargs, b.kwargs))
        if isinstance(a, BlockCall) and isinstance(b, BlockCall) and replace(b, kind=a.kind) == a:
            return a
        raise NotLinearError(f"other operators at batch {SIZES[0]} than at {SIZES[1]}")

    def spec(self, name: str, a: TensorSpec, b: TensorSpec) -> TensorSpec:
        if a.dtype != b.dtype or len(a.shape) != len(b.shape):
            raise NotLinearError(f"{name} has another rank or dtype at batch {SIZES[0]} than at {SIZES[1]}")
        shape = tuple(_line(name, x.fixed, y.fixed) for x, y in zip(a.shape, b.shape, strict=True))
        if any(size.per_sample < 0 or size.fixed < 0 for size in shape):
            raise NotLinearError(f"{name} has {a.shape} at batch {SIZES[0]}, {b.shape} at {SIZES[1]}")
        return replace(a, shape=shape)

    def argument(self, op: Op, a: Any, b: Any) -> Any:
        if a == b and type(a) is type(b):
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self.argument(op, x, y) for x, y in zip(a, b, strict=True))
        if type(a) is int and type(b) is int:
            return _line(f"an argument of {op.target}", a, b)
        raise NotLinearError(f"{op.module}: {op.target} takes {a!r} at batch {SIZES[0]}, {b!r} at {SIZES[1]}")


def _line(what: str, a: int, b: int) -> Extent:
    slope, rest = divmod(b - a, SIZES[1] - SIZES[0])
    if rest:
        raise NotLinearError(f"{what} is {a} at batch {SIZES[0]}, {b} at {SIZES[1]}")
    return Extent(slope, a - slope * SIZES[0])
