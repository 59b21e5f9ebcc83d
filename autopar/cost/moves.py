"""The demand of layout changes: collectives over mesh axes and the local copies around them.

What a change does is the same for every tensor: pieces of work on a share of it. They are found once for a pair of
layouts on a mesh, and then sized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from autopar.cost.demand import Demand
from autopar.graph import (
    DTYPE_BYTES,
    CollectiveKey,
    Layout,
    Operand,
    OpKey,
    TensorSpec,
    axes_of,
    is_even,
    largest_part,
    unit_of,
)
from autopar.plan import MeshAxis
from autopar.shard.program import Move
from autopar.shard.relayout import LOCAL_MOVES, after, gradient_layout, held_layout, plan_moves


class Piece(NamedTuple):
    """Work on a tensor's share of one in `ways`: `copy`, `divide`, or a collective over a group.

    Where a tensor is split unevenly `ways` is how many times its largest share the tensor is, a fraction.
    """

    kind: str
    ways: int | Fraction
    ranks: int = 1
    stride: int = 1

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return self.kind in ("copy", "divide")

    def op_key(self, elements: int, dtype: str) -> OpKey:
        """Key of local work, for a whole tensor of `elements`."""
        share = int(-(-elements // self.ways))
        if self.kind == "divide":
            return OpKey("aten.div.Tensor", (Operand((share,), dtype, False), 2))
        return copy_key((share,), dtype)

    def collective_key(self, elements: int, dtype: str) -> CollectiveKey:
        """Key of a collective, for a whole tensor of `elements`."""
        return CollectiveKey(self.kind, int(-(-elements // self.ways)) * DTYPE_BYTES[dtype], self.ranks, self.stride)


Pieces = tuple[Piece, ...]


def relayout_demand(spec: TensorSpec, source: Layout, target: Layout, mesh: Sequence[MeshAxis], batch: int) -> Demand:
    """Demand of putting a value of (global) `spec` from one layout into another at `batch` samples.

    The backward counts only where a gradient flows.
    """
    elements, dtype = prod(spec.shape_at(batch)), spec.dtype
    uneven = uneven_dims(dims_of(spec, batch), (source, target), tuple(axis.size for axis in mesh))
    forward, backward = relayout_pieces(source, target, tuple(mesh), uneven)
    backward = backward if spec.requires_grad else ()
    ops = [tuple(p.op_key(elements, dtype) for p in pieces if p.is_local) for pieces in (forward, backward)]
    sent = [
        tuple(p.collective_key(elements, dtype) for p in pieces if not p.is_local) for pieces in (forward, backward)
    ]
    return Demand((), ops[0], ops[1], sent[0], sent[1])


Dims: TypeAlias = tuple[tuple[int, int], ...]
"""Of each dim its length and how many of its elements belong to one sample (`graph.unit_of`)."""


def dims_of(spec: TensorSpec, batch: int) -> Dims:
    """The dims of a value at `batch` samples."""
    return tuple((e.at(batch), unit_of(e)) for e in spec.shape)


def uneven_dims(dims: Dims, layouts: Iterable[Layout | None], sizes: tuple[int, ...]) -> Dims:
    """`dims` if one of the layouts splits one of them unevenly over axes of `sizes`.

    Else (): what a change of layout takes is then the same for all values of so many elements.
    """
    splits = {(d, axes_of(x, d)) for x in layouts if x is not None for d in range(len(dims))}
    even = all(is_even(*dims[d], tuple(sizes[a] for a in axes)) for d, axes in splits)
    return () if even else dims


@lru_cache(maxsize=1 << 18)
def relayout_pieces(
    source: Layout, target: Layout, mesh: tuple[MeshAxis, ...], uneven: Dims = ()
) -> tuple[Pieces, Pieces]:
    """Pieces of a change of layout, forward and backward, of any value or of one that is split unevenly."""
    moves = plan_moves(source, target)
    forward = _walk(held_layout(source), moves.forward, mesh, uneven)
    return forward, _walk(gradient_layout(target), moves.backward, mesh, uneven)


def group_of(axes: Sequence[int], mesh: Sequence[MeshAxis]) -> tuple[int, int]:
    """Ranks of the group over `axes` flattened, and the stride that gives it the right span of devices."""
    ranks = prod(mesh[a].size for a in axes)
    span = max((mesh[a].size * mesh[a].stride for a in axes), default=1)
    return ranks, max(1, span // ranks)


def collective_key(kind: str, size_bytes: int, axes: Sequence[int], mesh: Sequence[MeshAxis]) -> CollectiveKey:
    """Key of a collective over mesh `axes` whose full buffer has `size_bytes`."""
    ranks, stride = group_of(axes, mesh)
    return CollectiveKey(kind, size_bytes, ranks, stride)


def copy_key(shape: tuple[int, ...], dtype: str) -> OpKey:
    """Key of a plain copy of a tensor."""
    return OpKey("aten.clone.default", (Operand(shape, dtype, False),))


def _walk(layout: Layout, moves: Sequence[Move], mesh: tuple[MeshAxis, ...], uneven: Dims) -> Pieces:
    """Follow a tensor through `moves`, starting in `layout`."""
    pieces: list[Piece] = []
    for move in moves:
        then = after(layout, move)
        before, behind = _ways(layout, mesh, uneven), _ways(then, mesh, uneven)
        pieces.extend(_copies(move, before, behind))
        if move.kind not in LOCAL_MOVES:
            ranks, stride = group_of(move.axes, mesh)
            # Gathers and scatters send parts that are filled up to the largest.
            filled = move.kind in ("all_gather", "reduce_scatter") and uneven
            ways = _simple(Fraction(max(before, behind)) / ranks) if filled else min(before, behind)
            pieces.append(Piece(move.kind, ways, ranks, stride))
        layout = then
    return tuple(pieces)


def _ways(layout: Layout, mesh: tuple[MeshAxis, ...], uneven: Dims) -> int | Fraction:
    """Ways in which `layout` splits a tensor: how many times its largest shard it is."""
    found: int | Fraction = prod(axis.size for axis, placement in zip(mesh, layout, strict=True) if placement >= 0)
    for dim, (length, unit) in enumerate(uneven):
        part, ways = length, 1
        for axis in axes_of(layout, dim):
            part, unit = largest_part(part, unit, mesh[axis].size)
            ways *= mesh[axis].size
        if part * ways != length:
            found = found * Fraction(length, part * ways)
    return _simple(found)


def _simple(number: int | Fraction) -> int | Fraction:
    return int(number) if number == int(number) else number


def _copies(move: Move, before: int | Fraction, behind: int | Fraction) -> list[Piece]:
    """Local work: collectives take the outermost dim: others are brought there or back; sums and slices are copies."""
    if move.kind == "divide":
        return [Piece("divide", before)]
    if move.kind in ("all_reduce", "pad", "slice"):
        return [Piece("copy", behind)]
    if move.kind == "all_to_all":
        return [Piece("copy", ways) for ways, dim in ((before, move.to_dim), (behind, move.dim)) if dim]
    if move.dim == 0:
        return []
    return [Piece("copy", before if move.kind == "reduce_scatter" else behind)]
