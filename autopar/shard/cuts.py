"""Where split dims are cut on the ranks of a group, and what must move where an op needs them cut elsewhere.

An op whose dims of one factor differ in length (heads, and the merged dim that a view makes them of) runs on whole
pieces of the factor. Where the factor divides evenly, that is how its dims lie. Elsewhere a longer dim is *recut*: each
rank sends what lies beyond its pieces to the neighbours that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

from autopar.errors import PlanError
from autopar.graph import Extent, Layout, TensorSpec, axes_of, is_even, local_shape, part_of, unit_of
from autopar.shard.program import Call, Move, Program
from autopar.shard.relayout import after

GroupName: TypeAlias = Callable[[tuple[int, ...]], str]
"""Name of the process group over some mesh axes (in axis order): ranks that differ on these axes only, row-major."""
Lengths: TypeAlias = tuple[int, ...]
"""Of each rank of a group, how much of a dim it holds."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A rank's `place` on mesh axes of `sizes`; by default the first, whose shards are the largest."""

    sizes: tuple[int, ...]
    place: tuple[int, ...] = ()

    def on(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The place on some axes."""
        return tuple(self.place[a] if self.place else 0 for a in axes)

    def part(self, extent: Extent, batch: int, axes: tuple[int, ...]) -> tuple[int, int]:
        """First element and length of this rank's part of a dim that `axes` split."""
        return part_of(extent, batch, [self.sizes[a] for a in axes], self.on(axes))

    def lengths(self, extent: Extent, batch: int, outer: tuple[int, ...], axes: tuple[int, ...]) -> Lengths:
        """Lengths of the parts that the group over `axes` has of this rank's part over `outer`."""
        sizes = [self.sizes[a] for a in (*outer, *axes)]
        places = product(*(range(self.sizes[a]) for a in axes))
        return tuple(part_of(extent, batch, sizes, (*self.on(outer), *place))[1] for place in places)


def encode_moves(
    moves: tuple[Move, ...], layout: Layout, spec: TensorSpec, batch: int, spot: Spot, group_name: GroupName
) -> list[str]:
    """Moves as the operator `autopar::relayout` takes them: `kind dim to_dim cut group`, one text a move.

    They start in `layout`. `cut` is the number of ranks where the parts are equal, else their lengths, `5,5,5,2`; of an
    all-to-all those of both dims, `5,5,5,2/4`.
    """
    texts = []
    for move in moves:
        dims = [d for d in (move.dim, move.to_dim) if d >= 0]
        cuts = [_cut(spec.shape[d], batch, spot, _outer(layout, d, move), move.axes) for d in dims]
        cut = "/".join(cuts) if cuts else str(prod(spot.sizes[a] for a in move.axes))
        texts.append(f"{move.kind} {move.dim} {move.to_dim} {cut} {group_name(move.axes)}")
        layout = after(layout, move)
    return texts


def _outer(layout: Layout, dim: int, move: Move) -> tuple[int, ...]:
    return tuple(a for a in axes_of(layout, dim) if a not in move.axes)


def _cut(extent: Extent, batch: int, spot: Spot, outer: tuple[int, ...], axes: tuple[int, ...]) -> str:
    lengths = spot.lengths(extent, batch, outer, axes)
    return str(len(lengths)) if len({*lengths}) == 1 else ",".join(map(str, lengths))


@dataclass(frozen=True, slots=True)
class Recut:
    """Dim `dim` of tensor `index` of a call (operands, then results): `lies` as layouts say, `seen` by the op.

    Both are lengths over the group of `axes`.
    """

    index: int
    dim: int
    axes: tuple[int, ...]
    lies: Lengths
    seen: Lengths

    def text(self, group_name: GroupName, to_op: bool) -> str:
        """The move, to what the op sees or from it."""
        first, then = (self.lies, self.seen) if to_op else (self.seen, self.lies)
        return f"recut {self.dim} -1 {','.join(map(str, first))}/{','.join(map(str, then))} {group_name(self.axes)}"


def recuts(call: Call, program: Program, batch: int) -> list[Recut]:
    """The dims that a call needs cut elsewhere than they lie. Raises PlanError where samples would have to be cut."""
    found = []
    for index, grains in enumerate(call.grains):
        name, layout = tensor_of(call, index)
        for dim, grain in enumerate(grains):
            axes = axes_of(layout, dim) if grain > 1 else ()
            extent, sizes = program.values[name].shape[dim], [program.axis_sizes[a] for a in axes]
            if not is_even(extent.at(batch) // grain, unit_of(extent) // grain or 1, sizes):
                spot = Spot(program.axis_sizes)
                lies = spot.lengths(extent, batch, (), axes)
                seen = tuple(grain * n for n in spot.lengths(_piece(extent, grain), batch, (), axes))
                if lies != seen and extent.is_batch:
                    raise PlanError(
                        f"op {call.op.name} ({call.op.target}): {batch} samples can't be dealt over {len(lies)} ranks "
                        f"by this plan, which needs one for each. Give it more, or make a plan for so few."
                    )
                if lies != seen:
                    found.append(Recut(index, dim, axes, lies, seen))
    return found


def seen_shape(call: Call, program: Program, index: int, batch: int, place: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Shape of the shard at `place` of tensor `index` of a call as the op sees it: whole pieces of each factor."""
    name, layout = tensor_of(call, index)
    spec, spot = program.values[name], Spot(program.axis_sizes, place)
    shape = local_shape(spec, batch, layout, program.axis_sizes, place)
    if not call.grains or max(call.grains[index], default=1) == 1:
        return shape
    seen = list(shape)
    for dim, grain in enumerate(call.grains[index]):
        if grain > 1 and (axes := axes_of(layout, dim)):
            seen[dim] = grain * spot.part(_piece(spec.shape[dim], grain), batch, axes)[1]
    return tuple(seen)


def tensor_of(call: Call, index: int) -> tuple[str, Layout]:
    """Name and layout of a tensor of a call, operands first."""
    names, layouts = (*call.operands, *call.op.results), (*call.operand_layouts, *call.result_layouts)
    return names[index], layouts[index]


def _piece(extent: Extent, grain: int) -> Extent:
    return Extent(extent.per_sample // grain, extent.fixed // grain)
