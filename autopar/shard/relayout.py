"""From one layout to another: which elementary moves, in which order.

Several axes may split one dim, the first axis outermost. An axis can therefore leave a dim only while it is the
innermost there, and enter one only as the new innermost: what stays put in a dim is the common prefix of the axes that
split it before and after; the rest leaves inner axes first, and then enters outer axes first. Within that order
whatever makes the local shard smaller comes early and gathers come late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from autopar.graph import BROADCAST, PARTIAL, REPLICATE, Layout
from autopar.shard.program import Move

LOCAL_MOVES = frozenset({"slice", "pad", "divide"})
"""Kinds of moves that need no communication."""


@dataclass(frozen=True, slots=True)
class Moves:
    """How a value (`forward`) and its gradient (`backward`) get from one layout to another."""

    forward: tuple[Move, ...]
    backward: tuple[Move, ...]


def gradient_layout(layout: Layout) -> Layout:
    """Layout of the gradient of a value that lies in `layout` (table in docs/design.md)."""
    return tuple(_GRADIENT.get(p, p) for p in layout)


def held_layout(layout: Layout) -> Layout:
    """`layout` with broadcast read as replicated: what each rank holds is the same, only gradients differ."""
    return tuple(REPLICATE if p == BROADCAST else p for p in layout)


_GRADIENT = {PARTIAL: REPLICATE, BROADCAST: PARTIAL}


@lru_cache(maxsize=1 << 16)
def plan_moves(source: Layout, target: Layout) -> Moves:
    """Moves that put a value from `source` into `target` and its gradient back.

    Forward and backward are planned each for itself, the backward between the layouts that the gradients of `target`
    and `source` have; that makes them adjoint. Every change is possible; moves that divide need floating values.
    """
    forward = find_path(held_layout(source), held_layout(target))
    return Moves(forward, find_path(gradient_layout(target), gradient_layout(source)))


@lru_cache(maxsize=1 << 16)
def find_path(source: Layout, target: Layout) -> tuple[Move, ...]:
    """Moves between two layouts of split, replicated and partial axes; adjacent moves of one kind are made one."""
    now, path = source, list[Move]()
    while now != target:
        move = _next_move(now, target)
        now = after(now, move)
        if path and _joins(path[-1], move):
            path[-1] = Move(move.kind, tuple(sorted(path[-1].axes + move.axes)), move.dim, move.to_dim)
        else:
            path.append(move)
    return tuple(path)


def after(layout: Layout, move: Move) -> Layout:
    """The layout that `move` makes of `layout`."""
    placement = {"all_reduce": REPLICATE, "all_gather": REPLICATE, "pad": PARTIAL, "divide": PARTIAL}.get(
        move.kind, move.to_dim if move.kind == "all_to_all" else move.dim
    )
    return tuple(placement if a in move.axes else p for a, p in enumerate(layout))


def _joins(first: Move, second: Move) -> bool:
    return first.kind == second.kind != "all_to_all" and first.dim == second.dim


def _splitting(layout: Layout, placement: int) -> tuple[int, ...]:
    """Axes with a placement: those that split a dim, outermost first."""
    return tuple(a for a, p in enumerate(layout) if p == placement)


def _dims(*layouts: Layout) -> list[int]:
    return sorted({p for layout in layouts for p in layout if p >= 0})


def _next_move(now: Layout, target: Layout) -> Move:
    entering = min(_entering(now, target), key=lambda m: _ENTER_ORDER.index(m.kind), default=None)
    if entering:
        return entering
    partial = _splitting(now, PARTIAL)
    if any(target[a] != PARTIAL for a in partial):  # where gathers are in the way of a reduce-scatter, this is cheaper
        return Move("all_reduce", tuple(a for a in partial if target[a] != PARTIAL))
    divided = tuple(a for a in _splitting(now, REPLICATE) if target[a] == PARTIAL)
    if divided:
        return Move("divide", divided)
    return min(_leaving(now, target), key=lambda ranked: ranked[0])[1]


_ENTER_ORDER = ("slice", "reduce_scatter", "all_to_all")


def _entering(now: Layout, target: Layout) -> Iterator[Move]:
    """For each dim that no axis has to leave any more: the move that brings its next axes in."""
    for dim in _dims(target):
        here, wanted = _splitting(now, dim), _splitting(target, dim)
        if here == wanted[: len(here)] and len(here) < len(wanted):
            move = _enter(now, dim, wanted[len(here) :])
            if move:
                yield move


def _enter(now: Layout, dim: int, pending: tuple[int, ...]) -> Move | None:
    placement = now[pending[0]]
    run = tuple(takewhile(lambda a: now[a] == placement, pending))
    if placement == REPLICATE:
        return Move("slice", run, dim)
    if placement == PARTIAL:
        return Move("reduce_scatter", run, dim)
    there = _splitting(now, placement)
    for length in range(len(run), 0, -1):
        if there[-length:] == run[:length]:  # only the innermost axes can leave a dim
            return Move("all_to_all", run[:length], placement, dim)
    return None


def _leaving(now: Layout, target: Layout) -> Iterator[tuple[int, Move]]:
    """For each dim that axes have to leave: the move of the innermost ones, with its rank (lowest first)."""
    for dim in _dims(now):
        here, wanted = _splitting(now, dim), _splitting(target, dim)
        stay = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(here, wanted, strict=False))))
        ranks = [_leaving_rank(dim, target[a]) for a in here[stay:]]
        if ranks:
            run = len(list(takewhile(ranks[-1].__eq__, reversed(ranks)))) if ranks[-1] != _AVOIDABLE else 1
            yield ranks[-1], Move("pad" if ranks[-1] == _PADDED else "all_gather", here[-run:], dim)


_RETURNING, _GATHERED, _AVOIDABLE, _PADDED = range(4)


def _leaving_rank(dim: int, goal: int) -> int:
    """Gathers that must be come first, before all those that a slice follows; pads come last, they make shards larger.

    An axis on its way to another dim may yet get there without a gather, once others have made room.
    """
    if goal == dim:
        return _RETURNING
    return {REPLICATE: _GATHERED, PARTIAL: _PADDED}.get(goal, _AVOIDABLE)
