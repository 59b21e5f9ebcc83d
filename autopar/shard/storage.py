"""How a parameter is kept: which axes deal out its rows (ZeRO), over which its gradient is summed, and by whom.

The one derivation of it: the emitter builds it, the memory model counts its bytes, the cost model its collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TypeAlias

from autopar.graph import BROADCAST, Layout, TensorSpec

Axes: TypeAlias = tuple[int, ...]


BUCKET_BYTES = 1 << 26
"""Most bytes of gradients or parameters flattened together for one collective; a larger tensor goes alone."""


class Keeper(Enum):
    """Who gathers a parameter for computing and reduces its gradient: once a step we, or FSDP2 every microbatch."""

    STEP = "step"
    FSDP = "fsdp"


@dataclass(frozen=True)
class ParameterStorage:
    """Of the shard that layers compute with each rank stores the rows of dim 0 dealt over `chunk_axes` (() = whole).

    The gradient is the sum over `sum_axes` of what the ranks compute. `zero` is the level that takes effect: 0 where
    nothing is dealt, 1 what we keep, 2 and 3 what FSDP2 does.
    """

    chunk_axes: Axes
    sum_axes: Axes
    zero: int

    @property
    def keeper(self) -> Keeper:
        """Who gathers the parameter and reduces its gradient."""
        return Keeper.FSDP if self.zero >= 2 else Keeper.STEP

    @property
    def scatters(self) -> bool:
        """Whether the gradient is summed where it is dealt out, so that a rank gets the sum of its rows alone."""
        return bool(self.chunk_axes) and set(self.chunk_axes) <= set(self.sum_axes)

    @property
    def remaining_axes(self) -> Axes:
        """Axes whose sum the scatter of the gradient (ours or FSDP's) has not done yet."""
        done = self.chunk_axes if self.scatters else ()
        return tuple(a for a in self.sum_axes if a not in done)

    def ways(self, sizes: tuple[int, ...]) -> int:
        """Ranks over which the rows are dealt on a mesh of `sizes`."""
        return prod(sizes[a] for a in self.chunk_axes)


def parameter_storage(spec: TensorSpec, layout: Layout, zero_axes: Axes, zero: int) -> ParameterStorage:
    """How a parameter that layers read as `layout` is kept under ZeRO level `zero` over `zero_axes`.

    These are data axes of the layer. Rows are dealt over those on which the parameter is whole. FSDP2 sums over all
    ranks it deals a parameter over, and has one mesh for a layer: what is not B on all of them is kept as in ZeRO 1.
    Scalars have no rows.
    """
    summed = tuple(a for a, p in enumerate(layout) if p == BROADCAST)
    dealt = tuple(a for a in zero_axes if layout[a] < 0) if zero and spec.shape else ()
    by_fsdp = zero >= 2 and dealt == zero_axes and set(dealt) <= set(summed)
    level = 0 if not dealt else zero if by_fsdp else 1
    return ParameterStorage(dealt, summed if spec.requires_grad else (), level)


def dealt_shape(shape: tuple[int, ...], ways: int) -> tuple[int, ...]:
    """Shape of the largest part when the rows (dim 0) of `shape` are dealt over `ways` ranks."""
    return (-(-shape[0] // ways), *shape[1:]) if shape else ()
