"""The demand of layout changes: collectives over mesh axes and the local copies around them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.cost.demand import Demand
from autopar.graph import DTYPE_BYTES, CollectiveKey, Layout, Operand, OpKey, TensorSpec, local_shape
from autopar.plan import MeshAxis
from autopar.shard.program import Move
from autopar.shard.relayout import LOCAL_MOVES, after, gradient_layout, held_layout, plan_moves

Shape = tuple[int, ...]


def relayout_demand(spec: TensorSpec, source: Layout, target: Layout, mesh: Sequence[MeshAxis], batch: int) -> Demand:
    """Demand of putting a value of (global) `spec` from one layout into another at `batch` samples.

    The backward counts only where a gradient flows.
    """
    moves = plan_moves(source, target)
    forward_ops, forward = _walk(spec, held_layout(source), moves.forward, mesh, batch)
    if not spec.requires_grad:
        return Demand(forward_ops=forward_ops, forward_collectives=forward)
    backward_ops, backward = _walk(spec, gradient_layout(target), moves.backward, mesh, batch)
    return Demand((), forward_ops, backward_ops, forward, backward)


def group_of(axes: Sequence[int], mesh: Sequence[MeshAxis]) -> tuple[int, int]:
    """Ranks of the group over `axes` flattened, and the stride that gives it the right span of devices."""
    ranks = prod(mesh[a].size for a in axes)
    span = max((mesh[a].size * mesh[a].stride for a in axes), default=1)
    return ranks, max(1, span // ranks)


def collective_key(kind: str, size_bytes: int, axes: Sequence[int], mesh: Sequence[MeshAxis]) -> CollectiveKey:
    """Key of a collective over mesh `axes` whose full buffer has `size_bytes`."""
    ranks, stride = group_of(axes, mesh)
    return CollectiveKey(kind, size_bytes, ranks, stride)


def copy_key(shape: Shape, dtype: str) -> OpKey:
    """Key of a plain copy of a tensor."""
    return OpKey("aten.clone.default", (Operand(shape, dtype, False),))


def _walk(
    spec: TensorSpec, layout: Layout, moves: Sequence[Move], mesh: Sequence[MeshAxis], batch: int
) -> tuple[tuple[OpKey, ...], tuple[CollectiveKey, ...]]:
    """Follow a tensor's local shape through `moves`, starting in `layout`."""
    whole, sizes = spec.shape_at(batch), tuple(axis.size for axis in mesh)
    ops: list[OpKey] = []
    collectives: list[CollectiveKey] = []
    for move in moves:
        then = after(layout, move)
        before, behind = local_shape(whole, layout, sizes), local_shape(whole, then, sizes)
        ops.extend(_copies(move, before, behind, spec.dtype))
        if move.kind not in LOCAL_MOVES:
            full_bytes = max(prod(before), prod(behind)) * DTYPE_BYTES[spec.dtype]
            collectives.append(collective_key(move.kind, full_bytes, move.axes, mesh))
        layout = then
    return tuple(ops), tuple(collectives)


def _copies(move: Move, before: Shape, behind: Shape, dtype: str) -> list[OpKey]:
    """Local work: collectives take the outermost dim: others are brought there or back; sums and slices are copies."""
    if move.kind == "divide":
        return [OpKey("aten.div.Tensor", (Operand(before, dtype, False), 2))]
    if move.kind in ("all_reduce", "pad", "slice"):
        return [copy_key(behind, dtype)]
    if move.kind == "all_to_all":
        return [copy_key(shape, dtype) for shape, dim in ((before, move.to_dim), (behind, move.dim)) if dim]
    if move.dim == 0:
        return []
    return [copy_key(before if move.kind == "reduce_scatter" else behind, dtype)]
