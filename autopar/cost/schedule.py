"""Pipeline schedules: in which order a device works, how many microbatches are under way, and how long a step takes.

The orders are those of torch.distributed.pipelining: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., "PipeDream",
2019) and interleaved 1F1B (Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021).
With p groups of devices and v chunks of the model on each there are p * v stages; stage s is on group s % p.

A step is the longest path through the operations: each waits for the one before it on its device and for its input
from the neighbouring stage. Operations no path joins are timed together, a level at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Indices = NDArray[np.intp]


class Work(NamedTuple):
    """One operation: the forward or backward pass of a microbatch through a stage."""

    stage: int
    microbatch: int
    backward: bool


class Event(NamedTuple):
    """An operation in time; `kind` is `forward` or `backward`, seconds count from the start of the step."""

    stage: int
    microbatch: int
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Shape:
    """What a schedule is laid out for: its name, groups of devices, chunks of the model on each, microbatches."""

    schedule: str
    groups: int
    chunks: int
    num_microbatches: int

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return self.groups * self.chunks

    @property
    def _rounds(self) -> int:
        return max(1, self.num_microbatches // self.groups)

    @property
    def per_round(self) -> int:
        """Microbatches that a chunk works on before the device turns to its next chunk."""
        return self.num_microbatches // self._rounds


def _gpipe(shape: Shape, group: int) -> list[Work]:
    numbers = range(shape.num_microbatches)
    return [Work(group, k, False) for k in numbers] + [Work(group, k, True) for k in numbers]


def _one_forward_one_backward(shape: Shape, group: int) -> list[Work]:
    count = shape.num_microbatches
    ahead = min(count, shape.groups - group)
    order = [Work(group, k, False) for k in range(ahead)]
    for k in range(count):
        order.append(Work(group, k, True))
        order += [Work(group, k + ahead, False)] if k + ahead < count else []
    return order


def _interleaved(shape: Shape, group: int) -> list[Work]:
    """Rounds of `per_round` microbatches through each chunk in turn; a device runs `ahead` forwards first."""
    per_round, chunks = shape.per_round, shape.chunks
    total = shape.num_microbatches * chunks
    ahead = min(total, (chunks - 1) * per_round + 2 * (shape.groups - 1 - group))

    def work(n: int, backward: bool) -> Work:
        lap, chunk = n // (per_round * chunks), n // per_round % chunks
        chunk = chunks - 1 - chunk if backward else chunk
        return Work(chunk * shape.groups + group, lap * per_round + n % per_round, backward)

    order = [work(n, False) for n in range(ahead)]
    for n in range(total):
        order += [work(n + ahead, False)] if n + ahead < total else []
        order.append(work(n, True))
    return order


ORDERS = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved": _interleaved}
"""The order in which a device of a group works, by schedule."""


@lru_cache(maxsize=4096)
def in_flight(shape: Shape) -> tuple[int, ...]:
    """For each stage, how many microbatches it holds activations of at most.

    min(p - i, m) at stage i of 1f1b, m for gpipe; interleaved as its order has it.
    """
    most = [0] * shape.stages
    for group in range(shape.groups):
        held = [0] * shape.stages
        for work in ORDERS[shape.schedule](shape, group):
            held[work.stage] += -1 if work.backward else 1
            most[work.stage] = max(most[work.stage], held[work.stage])
    return tuple(most)


class Holding(NamedTuple):
    """What a group of devices holds as its chunk `chunk` runs the backward pass of a microbatch.

    `saved[c]`: of how many microbatches its chunk c has activations, the running one included; `grown[c]`: whether
    gradients of chunk c exist from an earlier one.
    """

    chunk: int
    saved: tuple[int, ...]
    grown: tuple[bool, ...]


@lru_cache(maxsize=4096)
def holdings(shape: Shape, group: int) -> tuple[Holding, ...]:
    """The fullest states of a group's devices as backward passes run; what another one covers is left out."""
    saved, grown = [0] * shape.chunks, [False] * shape.chunks
    found: dict[Holding, None] = {}
    for work in ORDERS[shape.schedule](shape, group):
        chunk = work.stage // shape.groups
        if not work.backward:
            saved[chunk] += 1
            continue
        found[Holding(chunk, tuple(saved), tuple(grown))] = None
        saved[chunk] -= 1
        grown[chunk] = True
    return _uncovered(list(found))


def _uncovered(holdings: list[Holding]) -> tuple[Holding, ...]:
    """Those that no other one of the same chunk holds at least as much as."""
    chunks = np.array([h.chunk for h in holdings])
    amounts = np.array([h.saved + h.grown for h in holdings], dtype=np.intp)
    covers = (amounts[:, None] >= amounts).all(axis=-1) & (chunks[:, None] == chunks)
    np.fill_diagonal(covers, val=False)
    return tuple(h for h, covered in zip(holdings, covers.any(axis=0).tolist(), strict=True) if not covered)


@dataclass(frozen=True, eq=False)
class _Levels:
    """Operations numbered by level; `bounds[l]` to `bounds[l + 1]` are those of level l.

    `before` is the number of the one before on the device, `needs` of the one that sends the input; the count of all
    operations stands for none. `work` (operations, 3) are the columns of `Work`.
    """

    work: Indices
    before: Indices
    needs: Indices
    bounds: tuple[int, ...]


@lru_cache(maxsize=64)
def _levels(shape: Shape) -> _Levels:
    stages, count = shape.stages, shape.num_microbatches
    orders = [np.array(ORDERS[shape.schedule](shape, g), dtype=np.intp) for g in range(shape.groups)]
    work = np.concatenate(orders)
    nothing = len(work)
    place = np.empty((stages, count, 2), dtype=np.intp)
    place[work[:, 0], work[:, 1], work[:, 2]] = np.arange(nothing)
    before = np.arange(-1, nothing - 1)
    first = np.cumsum([0, *map(len, orders)])
    before[first[:-1]] = nothing
    needs = _needs(work, place, stages, nothing)
    level = np.full(nothing + 1, -1)
    level[nothing] = 0
    following, last = first[:-1].copy(), first[1:]
    number = 0
    while (waiting := np.flatnonzero(following < last)).size:
        ready = waiting[level[needs[following[waiting]]] >= 0]
        number += 1
        level[following[ready]] = number
        following[ready] += 1
    order = np.argsort(level[:-1], kind="stable")
    rank = np.empty(nothing + 1, dtype=np.intp)
    rank[order], rank[nothing] = np.arange(nothing), nothing
    bounds = np.searchsorted(level[order], np.arange(1, number + 2))
    return _Levels(work[order], rank[before[order]], rank[needs[order]], tuple(bounds.tolist()))


def _needs(work: Indices, place: Indices, stages: int, nothing: int) -> Indices:
    """The operation that each one's input comes from: one stage up or down, or the forward at the last stage."""
    stage, microbatch, backward = work.T
    above = np.where(stage > 0, place[stage - 1, microbatch, 0], nothing)
    below = place[np.minimum(stage + 1, stages - 1), microbatch, (stage < stages - 1).astype(np.intp)]
    return np.where(backward == 1, below, above)


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
        kinds = ("forward", "backward")
        return [
            Event(int(self.work[i, 0]), int(self.work[i, 1]), kinds[self.work[i, 2]], start, start + duration)
            for i in np.argsort(self.starts_s, kind="stable")
            for start, duration in [(float(self.starts_s[i]), float(self.durations_s[i]))]
        ]


def simulate(
    shape: Shape,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
    step_s: Sequence[float],
) -> Simulation:
    """Time a step: seconds of each stage's passes over one microbatch and of its work once a step (summed by group).

    `transfer_s[s]` is what sending between stage s and s + 1 takes, either way; a sender works on meanwhile.
    """
    levels = _levels(shape)
    stage, _, backward = levels.work.T
    passes = np.array([forward_s, backward_s], dtype=np.float64)
    durations: Seconds = passes[backward, stage]
    sent = np.array([*transfer_s, 0.0], dtype=np.float64)
    delay = np.where(backward == 1, sent[stage], np.where(stage > 0, sent[stage - 1], 0.0))
    ends = np.zeros(len(durations) + 1)
    for low, high in zip(levels.bounds, levels.bounds[1:], strict=False):
        arrived = ends[levels.needs[low:high]] + delay[low:high]
        ends[low:high] = np.maximum(ends[levels.before[low:high]], arrived) + durations[low:high]
    group = stage % shape.groups
    once = np.array([sum(step_s[g :: shape.groups]) for g in range(shape.groups)])
    finished = np.zeros(shape.groups)
    np.maximum.at(finished, group, ends[:-1])
    finished += once
    busy = np.asarray(np.bincount(group, weights=durations, minlength=shape.groups) + once, dtype=np.float64)
    starts: Seconds = ends[:-1] - durations
    return Simulation(float(finished.max()), finished, busy, levels.work, starts, durations)
