"""Layout changes at run time, as one dispatcher operator that takes its moves as text and its groups by name.

Generated code, checkpoint policies and profilers then see `autopar::relayout` with plain arguments, and its backward
is again that operator with the planned backward moves.
"""

# ruff: noqa: ARG001 - signatures are those of the operator

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
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

    Moves are texts `kind dim to_dim cut group` (see `cuts.encode_moves`); `x` is this rank's shard, any strides.
    Without forward moves the result is `x` itself or a view of it, and nothing is copied.
    """
    if forward:
        return torch.ops.autopar.relayout(x, list(forward), list(backward))  # type: ignore[no-any-return]
    if backward and x.requires_grad:
        return _Entry.apply(x, list(backward))  # type: ignore[no-any-return, no-untyped-call]
    return x


class TextMove(NamedTuple):
    """A move as text says it, over `size` ranks.

    `lengths`: what each rank holds of `dim` where it is split, `then` of `to_dim` (of `dim`, when it is recut); ()
    where all hold equal parts.
    """

    kind: str
    dim: int
    to_dim: int
    size: int
    group: str
    lengths: tuple[int, ...] = ()
    then: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> TextMove:
        """Inverse of `cuts.encode_moves`."""
        return _parsed(text)

    @property
    def mine(self) -> int:
        """This rank's place in the group."""
        return place_in(self.group)


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> TextMove:
    kind, dim, to_dim, cut, group = text.split(" ", 4)
    parts = [tuple(map(int, part.split(","))) for part in cut.split("/")]
    size = next((len(part) for part in parts if len(part) > 1), parts[0][0])
    lengths = [part if len(part) > 1 else () for part in parts]
    return TextMove(kind, int(dim), int(to_dim), size, group, *lengths)


def all_reduce(x: Tensor, group: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """`x` reduced over the ranks of a group, in a new contiguous tensor."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op, group=group_named(group))
    return result


def _all_reduce(x: Tensor, move: TextMove) -> Tensor:
    return all_reduce(x, move.group)


def _all_gather(x: Tensor, move: TextMove) -> Tensor:
    if move.lengths:
        return _uneven_all_gather(x, move)
    pieces = x.new_empty((move.size * x.shape[0], *x.shape[1:]))
    _ALL_GATHER(pieces, x.contiguous(), group=group_named(move.group))
    return _merge(pieces.view(move.size, *x.shape), move.dim)


def _uneven_all_gather(x: Tensor, move: TextMove) -> Tensor:
    """Parts are filled up to the length of the longest, which all send."""
    filled = _filled(x, move.dim, max(move.lengths))
    pieces = x.new_empty((move.size, *filled.shape))
    _ALL_GATHER(pieces.flatten(0, 1), filled, group=group_named(move.group))
    parts = [piece.narrow(move.dim, 0, n) for piece, n in zip(pieces, move.lengths, strict=True)]
    return torch.cat(parts, move.dim)


def _reduce_scatter(x: Tensor, move: TextMove) -> Tensor:
    if move.lengths:
        longest = max(move.lengths)
        pieces = torch.stack([_filled(part, move.dim, longest) for part in x.split(move.lengths, move.dim)])
    else:
        pieces = _cut(x, move.dim, move.size)
    result = x.new_empty(pieces.shape[1:])
    _REDUCE_SCATTER(result, pieces.flatten(0, 1), group=group_named(move.group))
    return result.narrow(move.dim, 0, move.lengths[move.mine]).contiguous() if move.lengths else result


def _all_to_all(x: Tensor, move: TextMove) -> Tensor:
    if move.lengths or move.then:
        return _uneven_all_to_all(x, move)
    pieces = _cut(x, move.to_dim, move.size)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group_named(move.group))
    return _merge(received, move.dim)


def _uneven_all_to_all(x: Tensor, move: TextMove) -> Tensor:
    """Rank i gets its part of `to_dim`, from each rank that one's part of `dim`."""
    leaving = move.lengths or (x.shape[move.dim],) * move.size
    entering = move.then or (x.shape[move.to_dim] // move.size,) * move.size
    shapes = [_with(x.shape, move.dim, n, move.to_dim, entering[move.mine]) for n in leaving]
    return torch.cat(_exchange(x.split(entering, move.to_dim), shapes, move), move.dim)


def _recut(x: Tensor, move: TextMove) -> Tensor:
    """Each rank gets what another one holds of its own new part of `dim`."""
    old, new = _spans(move.lengths), _spans(move.then)
    (first, end), wanted = old[move.mine], new[move.mine]
    parts = [x.narrow(move.dim, min(max(a, first), end) - first, _overlap((a, b), (first, end))) for a, b in new]
    shapes = [_with(x.shape, move.dim, _overlap(span, wanted)) for span in old]
    return torch.cat(_exchange(parts, shapes, move), move.dim)


def _spans(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """First element and end of neighbouring parts."""
    ends = [*accumulate(lengths)]
    return [(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def _with(shape: Sequence[int], *changes: int) -> list[int]:
    """`shape` with other lengths; `changes` are dim, length, dim, length, ..."""
    changed = list(shape)
    for dim, length in zip(changes[::2], changes[1::2], strict=True):
        changed[dim] = length
    return changed


def _exchange(parts: Sequence[Tensor], shapes: Sequence[list[int]], move: TextMove) -> list[Tensor]:
    """Send one part to each rank of the group; what comes from each has the shape given."""
    sent, sizes = torch.cat([part.reshape(-1) for part in parts]), [prod(shape) for shape in shapes]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group=group_named(move.group))
    return [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]


def _filled(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` filled up with zeros along `dim`, contiguous."""
    if x.shape[dim] == length:
        return x.contiguous()
    whole = x.new_zeros(_with(x.shape, dim, length))
    whole.narrow(dim, 0, x.shape[dim]).copy_(x)
    return whole


def _slice(x: Tensor, move: TextMove) -> Tensor:
    lengths = move.lengths or (x.shape[move.dim] // move.size,) * move.size
    mine = move.mine
    return x.narrow(move.dim, sum(lengths[:mine]), lengths[mine]).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, move: TextMove) -> Tensor:
    length = x.shape[move.dim]
    lengths = move.lengths or (length,) * move.size
    whole = x.new_zeros(_with(x.shape, move.dim, sum(lengths)))
    whole.narrow(move.dim, sum(lengths[: move.mine]), length).copy_(x)
    return whole


def _divide(x: Tensor, move: TextMove) -> Tensor:
    return x.contiguous() / move.size


_MOVES = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all,
    "slice": _slice, "pad": _pad, "divide": _divide, "recut": _recut,
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
            shape[move.dim] = _part(shape[move.dim], move, move.lengths)
        elif move.kind in ("all_gather", "pad", "all_to_all"):
            shape[move.dim] = sum(move.lengths) if move.lengths else shape[move.dim] * move.size
        if move.kind == "all_to_all":
            shape[move.to_dim] = _part(shape[move.to_dim], move, move.then)
        elif move.kind == "recut":
            shape[move.dim] = move.then[move.mine]
    return x.new_empty(shape)


def _part(whole: int, move: TextMove, lengths: tuple[int, ...]) -> int:
    return lengths[move.mine] if lengths else whole // move.size


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
