"""The demand of layout changes: collectives over mesh axes and the local copies around them.

What a change does is the same for every tensor: pieces of work on a share of it. They are found once for a pair of
layouts on a mesh, and then sized.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from autopar.cost.demand import Demand
from autopar.graph import DTYPE_BYTES, CollectiveKey, Layout, Operand, OpKey, TensorSpec
from autopar.plan import MeshAxis
from autopar.shard.program import Move
from autopar.shard.relayout import LOCAL_MOVES, after, gradient_layout, held_layout, plan_moves


class Piece(NamedTuple):
    """Work on a tensor's share of one in `ways`: `copy`, `divide`, or a collective over a group."""

    kind: str
    ways: int
    ranks: int = 1
    stride: int = 1

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return self.kind in ("copy", "divide")

    def op_key(self, elements: int, dtype: str) -> OpKey:
        """Key of local work, for a whole tensor of `elements`."""
        share = -(-elements // self.ways)
        if self.kind == "divide":
            return OpKey("aten.div.Tensor", (Operand((share,), dtype, False), 2))
        return copy_key((share,), dtype)

    def collective_key(self, elements: int, dtype: str) -> CollectiveKey:
        """Key of a collective, for a whole tensor of `elements`."""
        return CollectiveKey(self.kind, -(-elements // self.ways) * DTYPE_BYTES[dtype], self.ranks, self.stride)


Pieces = tuple[Piece, ...]


def relayout_demand(spec: TensorSpec, source: Layout, target: Layout, mesh: Sequence[MeshAxis], batch: int) -> Demand:
    """Demand of putting a value of (global) `spec` from one layout into another at `batch` samples.

    The backward counts only where a gradient flows.
    """
    elements, dtype = prod(spec.shape_at(batch)), spec.dtype
    forward, backward = relayout_pieces(source, target, tuple(mesh))
    backward = backward if spec.requires_grad else ()
    ops = [tuple(p.op_key(elements, dtype) for p in pieces if p.is_local) for pieces in (forward, backward)]
    sent = [
        tuple(p.collective_key(elements, dtype) for p in pieces if not p.is_local) for pieces in (forward, backward)
    ]
    return Demand((), ops[0], ops[1], sent[0], sent[1])


@lru_cache(maxsize=1 << 18)
def relayout_pieces(source: Layout, target: Layout, mesh: tuple[MeshAxis, ...]) -> tuple[Pieces, Pieces]:
    """Pieces of a change of layout, forward and backward."""
    moves = plan_moves(source, target)
    return _walk(held_layout(source), moves.forward, mesh), _walk(gradient_layout(target), moves.backward, mesh)


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


def _walk(layout: Layout, moves: Sequence[Move], mesh: tuple[MeshAxis, ...]) -> Pieces:
    """Follow a tensor through `moves`, starting in `layout`."""
    pieces: list[Piece] = []
    for move in moves:
        then = after(layout, move)
        before, behind = _ways(layout, mesh), _ways(then, mesh)
        pieces.extend(_copies(move, before, behind))
        if move.kind not in LOCAL_MOVES:
            pieces.append(Piece(move.kind, min(before, behind), *group_of(move.axes, mesh)))
        layout = then
    return tuple(pieces)


def _ways(layout: Layout, mesh: tuple[MeshAxis, ...]) -> int:
    """Ways in which `layout` splits a tensor."""
    return prod(axis.size for axis, placement in zip(mesh, layout, strict=True) if placement >= 0)


def _copies(move: Move, before: int, behind: int) -> list[Piece]:
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
