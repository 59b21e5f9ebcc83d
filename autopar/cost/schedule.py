"""Pipeline schedules in time: how long a step takes, and how many microbatches are under way.

A step is the longest path through the operations (`orders.py`): each waits for the one before it on its device and for
its input from the neighbouring stage. Operations no path joins are timed together, a level at a time; passes of
weights, which wait for nothing but their device, are part of the way to the next operation there. What is followed is
by how much each operation ends behind the work of its device, so that the way along a device needs no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.arrivals import gradients_under_way
from autopar.cost.orders import Indices, Kind, Shape, order
from autopar.schedules import SPLIT, V_SHAPED

Seconds = NDArray[np.float64]


class Event(NamedTuple):
    """An operation in time; seconds count from the start of the step."""

    stage: int
    microbatch: int
    kind: Kind
    start_s: float
    end_s: float


class _Counts(NamedTuple):
    """Of a group's operations in order; the columns of `saved`, `put_off`, `begun` and `grown` are its chunks.

    `chunk`, `kind` (operations,). After each operation (operations, chunks): of how many microbatches activations are
    held, of how many the gradients of weights are put off, and whether gradients exist, some or all.
    """

    chunk: Indices
    kind: Indices
    saved: Indices
    put_off: Indices
    begun: NDArray[np.bool_]
    grown: NDArray[np.bool_]


def _counts(shape: Shape, group: int) -> _Counts:
    stage, _, kind = order(shape, group).T
    own = np.array(shape.stages_of(group))
    mine = stage[:, None] == own

    def runs(*kinds: Kind) -> Indices:
        return np.cumsum(mine & _is(kind, *kinds)[:, None], axis=0)

    ahead, inputs, weights = runs(Kind.FORWARD, Kind.JOINT), runs(Kind.INPUT), runs(Kind.WEIGHT)
    whole = runs(Kind.BACKWARD)
    begun, grown = (whole + inputs) > 0, (whole + weights) > 0
    return _Counts(mine.argmax(axis=1), kind, ahead - whole - inputs, inputs - weights, begun, grown)


def _short(shape: Shape) -> Shape:
    """A shape of few microbatches in which groups hold what they hold in this one: V-shaped schedules repeat one round
    from 2 p + 1 microbatches on."""
    if shape.schedule not in V_SHAPED:
        return shape
    return replace(shape, num_microbatches=min(shape.num_microbatches, 2 * shape.groups + 1))


def _is(kind: Indices, *kinds: Kind) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.any([kind == one for one in kinds], axis=0)
    return found


@lru_cache(maxsize=4096)
def in_flight(shape: Shape) -> tuple[int, ...]:
    """For each stage, how many microbatches it holds activations of at most, until all their gradients are made.

    min(p - i, m) at stage i of 1f1b, m for gpipe; the others as their order has it.
    """
    most = [0] * shape.stages
    for group in range(shape.groups):
        counts = _counts(_short(shape), group)
        held = (counts.saved + counts.put_off).max(axis=0).tolist()
        for stage, count in zip(shape.stages_of(group), held, strict=True):
            most[stage] = count
    return tuple(most)


@lru_cache(maxsize=4096)
def weights_behind(shape: Shape) -> tuple[int, ...]:
    """For each stage, of how many microbatches gradients of weights are made when its group has sent all gradients on.

    That is after the last backward pass of the group's first stage.
    """
    found = [0] * shape.stages
    for group in range(shape.groups if shape.schedule in SPLIT else 0):
        counts = _counts(_short(shape), group)
        sent = np.flatnonzero((counts.chunk == 0) & _is(counts.kind, Kind.BACKWARD, Kind.INPUT))[-1]
        rest = counts.put_off[sent].tolist()
        for stage, count in zip(shape.stages_of(group), rest, strict=True):
            found[stage] = count
    return tuple(found)


class Turns(NamedTuple):
    """How groups of devices come to their first backward pass: of which of their chunks it is (groups,), how many
    forward passes of each chunk come before it (groups, chunks)."""

    chunk: Indices
    ahead: Indices


@lru_cache(maxsize=4096)
def turns(shape: Shape) -> Turns:
    """The turns of all groups of devices."""
    chunk, ahead = [], []
    for group in range(shape.groups):
        stage, _, kind = order(_short(shape), group).T
        own = shape.stages_of(group)
        first = int(((kind == Kind.BACKWARD) | (kind == Kind.INPUT)).argmax())
        chunk.append(own.index(int(stage[first])))
        ahead.append([np.count_nonzero(stage[:first] == one) for one in own])
    return Turns(np.array(chunk), np.array(ahead))


class Holding(NamedTuple):
    """What a group of devices holds as its chunk `chunk` runs the backward pass of a microbatch.

    `saved[c]`: of how many microbatches its chunk c has activations, the running one included; `grown[c]`: whether all
    gradients of chunk c exist from an earlier one. Where a schedule splits the backward pass, `half`: 1 for the half
    that puts gradients of weights off, 2 for the one that makes them (0: the pass is whole); `put_off[c]`: of how many
    other microbatches these are still to be made; `begun[c]`: whether the gradients that aren't put off exist.
    `sent[c]`: of how many microbatches gradients that chunk c has sent are kept, where they aren't waited for at once.
    """

    chunk: int
    saved: tuple[int, ...]
    grown: tuple[bool, ...]
    half: int = 0
    put_off: tuple[int, ...] = ()
    begun: tuple[bool, ...] = ()
    sent: tuple[int, ...] = ()


@lru_cache(maxsize=4096)
def holdings(shape: Shape, group: int) -> tuple[Holding, ...]:
    """The fullest states of a group's devices as backward passes run; what another one covers is left out."""
    counts = _counts(_short(shape), group)
    first_weights = (counts.kind == Kind.WEIGHT) & ~_before(counts.grown)[np.arange(len(counts.kind)), counts.chunk]
    at = np.flatnonzero(_is(counts.kind, Kind.BACKWARD, Kind.INPUT) | first_weights)
    chunk, half = counts.chunk[at, None], _HALF[counts.kind[at, None]]
    saved, grown, begun, put_off = (_before(n)[at] for n in (counts.saved, counts.grown, counts.begun, counts.put_off))
    others = put_off - ((half == 2) & (np.arange(shape.chunks) == chunk))
    sent = gradients_under_way(_short(shape), group)[at] if keeps_sent(shape) else np.zeros_like(saved)
    split = (others, begun) if shape.schedule in SPLIT else ()
    states = np.concatenate([chunk, half, saved, sent, grown, *split], axis=1)
    different = states[np.sort(np.unique(states, axis=0, return_index=True)[1])]
    return tuple(_holding(row, shape) for row in _uncovered(different, shape.chunks).tolist())


def keeps_sent(shape: Shape) -> bool:
    """Whether what is sent is kept until it is known to have arrived, and not waited for at once."""
    return shape.chunks > 1 or shape.schedule in SPLIT


_HALF = np.array([{Kind.INPUT: 1, Kind.WEIGHT: 2}.get(kind, 0) for kind in Kind])


def _before(after: Indices | NDArray[np.bool_]) -> Indices:
    """What was counted after each operation, before each."""
    return np.concatenate([np.zeros_like(after[:1]), after[:-1]])


@lru_cache(maxsize=4096)
def fullest(shape: Shape) -> tuple[int, ...]:
    """For each stage, of how many microbatches its group holds activations as it holds most beside all gradients.

    A step of one microbatch is counted without gradients.
    """
    found = [0] * shape.stages
    for group in range(shape.groups):
        counts = _counts(_short(shape), group)
        saved, grown = _before(counts.saved), _before(counts.grown).all(axis=1)
        at = _is(counts.kind, Kind.BACKWARD, Kind.INPUT) & (grown | (shape.num_microbatches == 1))
        held = saved[at][saved[at].sum(axis=1).argmax()] if at.any() else saved[0]
        for stage, count in zip(shape.stages_of(group), held.tolist(), strict=True):
            found[stage] = count
    return tuple(found)


def _holding(row: Sequence[int], shape: Shape) -> Holding:
    """Of the numbers that `holdings` counts."""
    chunk, half, *rest = row
    saved, sent, grown, put_off, begun = (tuple(rest[i * shape.chunks : (i + 1) * shape.chunks]) for i in range(5))
    kept = sent if keeps_sent(shape) else ()
    return Holding(chunk, saved, tuple(map(bool, grown)), half, put_off, tuple(map(bool, begun)), kept)


def _uncovered(states: Indices, chunks: int) -> Indices:
    """Those that no other one alike in the first two numbers is at least as much as in each number.

    A microbatch's gradient that was sent counts for no more than what was saved of another one, the input among it.
    """
    amounts = states[:, 2:].copy()
    amounts[:, chunks : 2 * chunks] += amounts[:, :chunks]
    alike = (states[:, None, :2] == states[:, :2]).all(axis=-1)
    covers = (amounts[:, None] >= amounts).all(axis=-1) & alike
    np.fill_diagonal(covers, val=False)
    found: Indices = states[~covers.any(axis=0)]
    return found


class _Level(NamedTuple):
    """What the operations of a level wait for, and the parts of the layout's room that are theirs, cut out once.

    `before` are the places of those before them on their devices, and `own` the room there where they lie in a row.
    """

    waits: Indices
    before: Indices
    own: Seconds | None
    added: Seconds
    lags: Seconds
    arrived: Seconds
    rows: tuple[Seconds, ...]


@dataclass(frozen=True, eq=False)
class _Layout:
    """All operations, device by device, and of these the ones that wait for others by level of dependence.

    What an operation ends behind the work of its device up to there is its *lag*: it never falls along a device, so
    that only inputs need a sum. `lags` (waiting + 2,) is the room for them, in which the last but one stands for no
    input and the last for none before on the device. `levels[l].waits` (1 or 2, n): for the operations of level l the
    one that sends the input, and the one that sends that of the joint pass. `added` (1 or 2, waiting): room for by how
    much an input's lag is longer here, for one simulation at a time (`used`); it is the work of devices before the
    place `sent` less that before `begun` (waiting,), and the time over the cut `crossed`, the number of cuts for none.

    `work` (operations, 3): the columns of `Work`; `row` (operations,): which pass over which stage it is as one number;
    `lag` (operations,): the waiting operation whose lag is its own. Joint passes and those of weights wait for nothing
    but the one beside them. `bounds` (groups + 1,): where the operations of each group begin. `stage_groups` (stages,):
    the group of each stage.
    """

    work: Indices
    row: Indices
    lag: Indices
    bounds: Indices
    levels: tuple[_Level, ...]
    added: Seconds
    lags: Seconds
    sent: Indices
    begun: Indices
    crossed: Indices
    stage_groups: Indices
    used: Lock = field(default_factory=Lock)


@lru_cache(maxsize=64)
def _layout(shape: Shape) -> _Layout:
    orders = [order(shape, g) for g in range(shape.groups)]
    work = np.concatenate(orders)
    device = np.repeat(np.arange(shape.groups), [len(o) for o in orders])
    stage, kind = work[:, 0], work[:, 2]
    late, joint = kind == Kind.WEIGHT, kind == Kind.JOINT
    waiting = ~(late | joint)
    group, count = device[waiting], int(waiting.sum())
    passed = np.cumsum(waiting)
    needs = _needs(shape, work[~late], (passed - waiting)[~late], count)
    waits = np.full((2 + bool(joint.any()), count), count)
    waits[0, 1:] = np.where(group[1:] == group[:-1], np.arange(count - 1), count)
    waits[1] = needs[~joint[~late]]
    waits[-1, passed[joint]] = needs[joint[~late]]
    level = _levels(waits, np.searchsorted(group, np.arange(shape.groups + 1)))
    placed = np.argsort(level, kind="stable")
    rank = np.empty(count + 1, dtype=np.intp)
    rank[placed], rank[count] = np.arange(count), count
    cuts = np.searchsorted(level[placed], np.arange(2, level.max() + 1))
    forward = (kind == Kind.FORWARD) | joint
    crossed = np.where(forward, (stage - 1) % shape.stages, stage)
    lag = rank[np.where(joint, passed, passed - 1)]
    # joint passes send as they end, which is with the operation behind them
    ends = np.append(np.flatnonzero(waiting), -1) + 1
    begins = np.flatnonzero(waiting) - np.concatenate([[False], joint[:-1]])[waiting]
    first = waits[0] == count
    both = np.stack([crossed[waiting], np.zeros(count, dtype=np.intp) + shape.stages - 1])
    both[1, passed[joint]] = crossed[joint]
    before = np.where(first, count + 1, rank[waits[0]])[placed]
    inputs = waits[1:, placed]
    added, lags = np.empty(inputs.shape), np.zeros(count + 2)
    lags[-1] = -np.inf
    return _Layout(
        work, kind * shape.stages + stage, lag, np.searchsorted(device, np.arange(shape.groups + 1)),
        _cut(np.split(rank[inputs], cuts, axis=1), before, added, lags), added, lags,
        ends[inputs], begins[placed], both[: len(inputs), placed],
        np.array([shape.group_of(s) for s in range(shape.stages)]),
    )  # fmt: skip


def _cut(waits: Sequence[Indices], before: Indices, added: Seconds, lags: Seconds) -> tuple[_Level, ...]:
    """The levels, each with its parts of `added` and `lags`."""
    levels, low = [], 0
    for found in waits:
        high, arrived = low + found.shape[1], np.empty(found.shape)
        there, start = before[low:high], int(before[low])
        row = bool((there == np.arange(start, start + high - low)).all())
        own = lags[start : start + high - low] if row else None
        here = (np.ascontiguousarray(found), there, own, added[:, low:high])
        levels.append(_Level(*here, lags[low:high], arrived, tuple(arrived)))
        low = high
    return tuple(levels)


def _levels(waits: Indices, bounds: Indices) -> Indices:
    """The level of each operation, from 1: one more than those that it waits for.

    `waits` (w, operations): the others, and the count of all for none; those of group g are `bounds[g]` to
    `bounds[g + 1]` in their order.
    """
    count = waits.shape[1]
    level = np.full(count + 1, -1)
    level[count] = 0
    following, last = bounds[:-1].copy(), bounds[1:]
    number = 0
    while (waiting := np.flatnonzero(following < last)).size:
        able = waiting[(level[waits[:, following[waiting]]] >= 0).all(axis=0)]
        number += 1
        level[following[able]] = number
        following[able] += 1
    return level[:count]


def _needs(shape: Shape, work: Indices, waiting: Indices, nothing: int) -> Indices:
    """What each operation's input comes from: one stage up or down, or the forward pass at the last stage.

    `waiting` (operations,): the number of the waiting operation that each is or belongs to.
    """
    stages = shape.stages
    stage, microbatch, kind = work.T
    back = ((kind != Kind.FORWARD) & (kind != Kind.JOINT)).astype(np.intp)
    place = np.empty((stages, shape.num_microbatches, 2), dtype=np.intp)
    place[stage, microbatch, back] = waiting
    above = np.where(stage > 0, place[stage - 1, microbatch, 0], nothing)
    below = place[np.minimum(stage + 1, stages - 1), microbatch, (stage < stages - 1).astype(np.intp)]
    return np.where(back == 1, below, above)


@dataclass(frozen=True, eq=False)
class Simulation:
    """A step in time. `ends_s` (groups,): when each group has finished its own optimizer step.

    `busy_s` (groups,): seconds it works; `busiest` is the group that works longest.
    """

    step_time_s: float
    ends_s: Seconds
    busy_s: Seconds
    work: Indices
    starts_s: Seconds
    durations_s: Seconds

    @property
    def busiest(self) -> int:
        """The group of devices that works longest, the first of equal ones."""
        return int(np.argmax(self.busy_s))

    @property
    def bubble_s(self) -> float:
        """Seconds of the step in which the busiest group idles."""
        return max(0.0, self.step_time_s - float(self.busy_s.max()))

    @property
    def timeline(self) -> list[Event]:
        """All passes in order of their start."""
        return [
            Event(int(self.work[i, 0]), int(self.work[i, 1]), Kind(self.work[i, 2]), start, start + duration)
            for i in np.argsort(self.starts_s, kind="stable")
            for start, duration in [(float(self.starts_s[i]), float(self.durations_s[i]))]
        ]


def simulate(
    shape: Shape,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
    step_s: Sequence[float],
    weight_s: Sequence[float] | None = None,
) -> Simulation:
    """Time a step: seconds of each stage's passes over one microbatch and of its work once a step (summed by group).

    `transfer_s[s]` is what sending between stage s and s + 1 takes, either way; a sender works on meanwhile. Of
    `backward_s` the gradients of weights take `weight_s` (none unless given) where the schedule makes them apart.
    """
    layout = _layout(shape)
    late = np.zeros(shape.stages) if weight_s is None else np.asarray(weight_s, dtype=np.float64)
    whole = np.asarray(backward_s, dtype=np.float64)
    durations: Seconds = np.concatenate([forward_s, whole, whole - late, late, forward_s]).take(layout.row)
    done = np.concatenate([[0.0], durations.cumsum()])
    with layout.used:
        _find_lags(layout, done, np.array([*transfer_s, 0.0], dtype=np.float64))
        lags: Seconds = layout.lags.take(layout.lag)
    starts: Seconds = lags + done[:-1]
    ends: Seconds = lags + done[1:]
    once = np.bincount(layout.stage_groups, weights=step_s, minlength=shape.groups)
    finished: Seconds = ends[layout.bounds[1:] - 1] + once
    busy = np.asarray(np.diff(done[layout.bounds]) + once, dtype=np.float64)
    return Simulation(float(finished.max()), finished, busy, layout.work, starts, durations)


def _find_lags(layout: _Layout, done: Seconds, delay: Seconds) -> None:
    """Lags of all operations that wait; before the operations `done` (operations + 1,) seconds of work lie, of those
    on earlier devices, too, and inputs arrive `delay` (cuts + 1,) seconds after they were sent."""
    added = done.take(layout.sent)
    added -= done.take(layout.begun)
    added += delay.take(layout.crossed)
    layout.added[:] = added
    take, add, maximum = layout.lags.take, np.add, np.maximum
    for waits, before, own, more, lags, arrived, rows in layout.levels:
        take(waits, None, arrived, "clip")
        add(arrived, more, arrived)
        maximum(rows[0], take(before) if own is None else own, out=lags)
        if len(rows) > 1:
            maximum(lags, rows[1], out=lags)
