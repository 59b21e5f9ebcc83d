"""The demand of layout changes: collectives over mesh axes and the local copies around them.

What a change does is the same for every tensor: pieces of work on a share of it. They are found once for a pair of
layouts on a mesh, and then sized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from autopar.shard.relayout import LOCAL_MOVES, after, find_path, gradient_layout, held_layout


class Piece(NamedTuple):
    """Work on a tensor's share of one in `ways`: `copy`, `divide`, or a collective over a group.

    For a tensor that is split unevenly `elements` (0 elsewhere) are those of its largest share.
    """

    kind: str
    ways: int
    elements: int = 0
    ranks: int = 1
    stride: int = 1

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return self.kind in ("copy", "divide")

    def share_of(self, elements: int) -> int:
        """Elements of the share of a whole tensor of `elements`."""
        return self.elements or -(-elements // self.ways)

    def op_key(self, elements: int, dtype: str) -> OpKey:
        """Key of local work, for a whole tensor of `elements`."""
        share = self.share_of(elements)
        if self.kind == "divide":
            return OpKey("aten.div.Tensor", (Operand((share,), dtype, False), 2))
        return copy_key((share,), dtype)

    def collective_key(self, elements: int, dtype: str) -> CollectiveKey:
        """Key of a collective, for a whole tensor of `elements`."""
        return CollectiveKey(self.kind, self.share_of(elements) * DTYPE_BYTES[dtype], self.ranks, self.stride)


Pieces = tuple[Piece, ...]


Dims: TypeAlias = tuple[tuple[int, int], ...]
"""Of each dim its length and how many of its elements belong to one sample (`graph.unit_of`)."""


def relayout_demand(spec: TensorSpec, source: Layout, target: Layout, mesh: Sequence[MeshAxis], batch: int) -> Demand:
    """Demand of putting a value of (global) `spec` from one layout into another at `batch` samples.

    The backward counts only where a gradient flows.
    """
    uneven = uneven_dims(dims_of(spec, batch), (source, target), tuple(axis.size for axis in mesh))
    return _demand(prod(spec.shape_at(batch)), spec.dtype, spec.requires_grad, source, target, tuple(mesh), uneven)


@lru_cache(maxsize=1 << 16)
def _demand(
    elements: int, dtype: str, trained: bool, source: Layout, target: Layout, mesh: tuple[MeshAxis, ...], uneven: Dims
) -> Demand:
    forward, backward = relayout_pieces(source, target, mesh, uneven)
    backward = backward if trained else ()
    ops = [tuple(p.op_key(elements, dtype) for p in pieces if p.is_local) for pieces in (forward, backward)]
    sent = [
        tuple(p.collective_key(elements, dtype) for p in pieces if not p.is_local) for pieces in (forward, backward)
    ]
    return Demand((), ops[0], ops[1], sent[0], sent[1])


def dims_of(spec: TensorSpec, batch: int) -> Dims:
    """The dims of a value at `batch` samples."""
    return tuple((e.at(batch), unit_of(e)) for e in spec.shape)


def uneven_dims(dims: Dims, layouts: Iterable[Layout | None], sizes: tuple[int, ...]) -> Dims:
    """`dims` if one of the layouts splits one of them unevenly over axes of `sizes`.

    Else (): what a change of layout takes is then the same for all values of so many elements.
    """
    splits = _splits(tuple(layouts), sizes) if dims else ()
    return () if all(is_even(*dims[d], ways) for d, ways in splits) else dims


@lru_cache(maxsize=1 << 14)
def _splits(layouts: tuple[Layout | None, ...], sizes: tuple[int, ...]) -> frozenset[tuple[int, tuple[int, ...]]]:
    """The dims that some of the layouts split, each with the sizes of the axes that do."""
    split = {(d, x) for x in layouts if x is not None for d in x if d >= 0}
    return frozenset((d, tuple(sizes[a] for a in axes_of(x, d))) for d, x in split)


@lru_cache(maxsize=1 << 18)
def relayout_pieces(
    source: Layout, target: Layout, mesh: tuple[MeshAxis, ...], uneven: Dims = ()
) -> tuple[Pieces, Pieces]:
    """Pieces of a change of layout, forward and backward, of any value or of one that is split unevenly."""
    forward = _walk(held_layout(source), held_layout(target), mesh, uneven)
    return forward, _walk(gradient_layout(target), gradient_layout(source), mesh, uneven)


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


Share: TypeAlias = tuple[int, int]
"""Part of a tensor: one in so many or, if it is split unevenly, so many elements; the other number is 0."""


@lru_cache(maxsize=1 << 18)
def _walk(source: Layout, target: Layout, mesh: tuple[MeshAxis, ...], uneven: Dims) -> Pieces:
    """Follow a tensor from one layout to another."""
    pieces: list[Piece] = []
    before = _share(source, mesh, uneven)
    for move, layout in _trail(source, target):
        behind = _share(layout, mesh, uneven)
        pieces.extend(_copies(move, before, behind))
        if move.kind not in LOCAL_MOVES:
            ranks, stride = group_of(move.axes, mesh)
            pieces.append(Piece(move.kind, *_sent(move, before, behind, ranks), ranks, stride))
        before = behind
    return tuple(pieces)


@lru_cache(maxsize=1 << 16)
def _trail(source: Layout, target: Layout) -> tuple[tuple[Move, Layout], ...]:
    """The moves from one layout to another, each with the layout it leads to."""
    found, layout = [], source
    for move in find_path(source, target):
        layout = after(layout, move)
        found.append((move, layout))
    return tuple(found)


def _share(layout: Layout, mesh: tuple[MeshAxis, ...], uneven: Dims) -> Share:
    """The largest shard of a tensor that lies in `layout`."""
    if not uneven:
        return prod(axis.size for axis, placement in zip(mesh, layout, strict=True) if placement >= 0), 0
    parts = list(uneven)
    for axis, placement in enumerate(layout):
        if placement >= 0:
            parts[placement] = largest_part(*parts[placement], mesh[axis].size)
    return 0, prod(length for length, _ in parts)


def _sent(move: Move, before: Share, behind: Share, ranks: int) -> Share:
    """The full buffer of a collective; gathers and scatters of uneven parts fill them up to the largest."""
    if before[0]:
        return min(before, behind)
    smaller, larger = sorted((before[1], behind[1]))
    return 0, smaller * ranks if move.kind in ("all_gather", "reduce_scatter") else larger


def _copies(move: Move, before: Share, behind: Share) -> list[Piece]:
    """Local work: collectives take the outermost dim: others are brought there or back; sums and slices are copies."""
    if move.kind == "divide":
        return [Piece("divide", *before)]
    if move.kind in ("all_reduce", "pad", "slice"):
        return [Piece("copy", *behind)]
    if move.kind == "all_to_all":
        return [Piece("copy", *share) for share, dim in ((before, move.to_dim), (behind, move.dim)) if dim]
    if move.dim == 0:
        return []
    return [Piece("copy", *(before if move.kind == "reduce_scatter" else behind))]
