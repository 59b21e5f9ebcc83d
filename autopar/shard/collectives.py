"""Layout changes at run time, as one dispatcher operator that takes its moves as text and its groups by name.

Generated code, checkpoint policies and profilers then see `autopar::relayout` with plain arguments, and its backward
is again that operator with the planned backward moves.
"""

# ruff: noqa: ARG001 - signatures are those of the operator

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.shard.torch_private import group_named, place_in

LIBRARY = torch.library.Library("autopar", "FRAGMENT")
LIBRARY.define("relayout(Tensor x, str[] forward, str[] backward) -> Tensor")

# torch 2.13 renamed them
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def relayout(x: Tensor, forward: Sequence[str], backward: Sequence[str]) -> Tensor:
    """Apply `forward` moves to `x`, and `backward` moves to its gradient.

    Moves are texts `kind dim to_dim size group` (see `localize.encode_moves`); `x` is this rank's shard, any strides.
    Without forward moves the result is `x` itself or a view of it, and nothing is copied.
    """
    if forward:
        return torch.ops.autopar.relayout(x, list(forward), list(backward))  # type: ignore[no-any-return]
    if backward and x.requires_grad:
        return _Entry.apply(x, list(backward))  # type: ignore[no-any-return, no-untyped-call]
    return x


class TextMove(NamedTuple):
    """A move as text says it, over `size` ranks."""

    kind: str
    dim: int
    to_dim: int
    size: int
    group: str

    @classmethod
    def parse(cls, text: str) -> TextMove:
        """Inverse of `localize.encode_moves`."""
        kind, dim, to_dim, size, group = text.split(" ", 4)
        return cls(kind, int(dim), int(to_dim), int(size), group)


def all_reduce(x: Tensor, group: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """`x` reduced over the ranks of a group, in a new contiguous tensor."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op, group=group_named(group))
    return result


def _all_reduce(x: Tensor, move: TextMove) -> Tensor:
    return all_reduce(x, move.group)


def _all_gather(x: Tensor, move: TextMove) -> Tensor:
    pieces = x.new_empty((move.size * x.shape[0], *x.shape[1:]))
    _ALL_GATHER(pieces, x.contiguous(), group=group_named(move.group))
    return _merge(pieces.view(move.size, *x.shape), move.dim)


def _reduce_scatter(x: Tensor, move: TextMove) -> Tensor:
    pieces = _cut(x, move.dim, move.size)
    result = x.new_empty(pieces.shape[1:])
    _REDUCE_SCATTER(result, pieces.flatten(0, 1), group=group_named(move.group))
    return result


def _all_to_all(x: Tensor, move: TextMove) -> Tensor:
    pieces = _cut(x, move.to_dim, move.size)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group_named(move.group))
    return _merge(received, move.dim)


def _slice(x: Tensor, move: TextMove) -> Tensor:
    length = x.shape[move.dim] // move.size
    return x.narrow(move.dim, length * place_in(move.group), length).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, move: TextMove) -> Tensor:
    length = x.shape[move.dim]
    whole = x.new_zeros((*x.shape[: move.dim], length * move.size, *x.shape[move.dim + 1 :]))
    whole.narrow(move.dim, length * place_in(move.group), length).copy_(x)
    return whole


def _divide(x: Tensor, move: TextMove) -> Tensor:
    return x.contiguous() / move.size


_MOVES = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all,
    "slice": _slice, "pad": _pad, "divide": _divide,
}  # fmt: skip


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` cut into `size` pieces along `dim`, stacked along a new first dim, contiguous."""
    shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0).contiguous()


def _merge(pieces: Tensor, dim: int) -> Tensor:
    """Inverse of `_cut`."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


@torch.library.impl(LIBRARY, "relayout", "CompositeExplicitAutograd")
def _run(x: Tensor, forward: list[str], backward: list[str]) -> Tensor:
    if not forward:
        return x.clone()
    for text in forward:
        move = TextMove.parse(text)
        x = _MOVES[move.kind](x, move)
    return x


@torch.library.register_fake("autopar::relayout", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(x: Tensor, forward: list[str], backward: list[str]) -> Tensor:
    shape = list(x.shape)
    for text in forward:
        move = TextMove.parse(text)
        if move.kind in ("reduce_scatter", "slice"):
            shape[move.dim] //= move.size
        elif move.kind in ("all_gather", "pad", "all_to_all"):
            shape[move.dim] *= move.size
        if move.kind == "all_to_all":
            shape[move.to_dim] //= move.size
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.moves = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return relayout(gradient, ctx.moves, ()), None, None


torch.library.register_autograd("autopar::relayout", _backward, setup_context=_setup, lib=LIBRARY)


class _Entry(torch.autograd.Function):
    """A value used as it is whose gradient has to be moved: a view forward, `autopar::relayout` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: list[str]) -> Tensor:
        """`x` itself, as a view."""
        ctx.moves = moves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient moved."""
        return relayout(gradient, ctx.moves, ()), None
