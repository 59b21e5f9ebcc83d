"""The order in which each group of devices works under a schedule, as torch.distributed.pipelining runs it.

GPipe (Huang et al., 2019), 1F1B (Narayanan et al., "PipeDream", 2019), interleaved 1F1B (Narayanan et al., "Efficient
large-scale language model training on GPU clusters", 2021), the zero-bubble schedules ZB-H1 (`zb`, with several chunks
interleaved) and ZB-V (Qi et al., "Zero bubble pipeline parallelism", 2023) and DualPipeV (DeepSeek-AI, 2024/25).
With p groups of devices and v chunks of the model on each there are p * v stages, placed as `schedules.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.schedules import group_of, stages_of

Indices = NDArray[np.intp]


class Kind(IntEnum):
    """A pass over a microbatch; schedules that split the backward pass run `INPUT` and later `WEIGHT` for it.

    `JOINT` is a forward pass in one with the backward pass that follows it: they wait for the inputs of both, run one
    after the other, and what both make is sent when both have ended.
    """

    FORWARD = 0
    BACKWARD = 1
    INPUT = 2
    WEIGHT = 3
    JOINT = 4

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward pass."""
        return self in (Kind.FORWARD, Kind.JOINT)


class Work(NamedTuple):
    """One operation: a pass of a microbatch through a stage."""

    stage: int
    microbatch: int
    kind: Kind


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

    def group_of(self, stage: int) -> int:
        """The group of devices of a stage."""
        return group_of(self.schedule, stage, self.groups)

    def stages_of(self, group: int) -> tuple[int, ...]:
        """The stages of a group in order of the model."""
        return stages_of(self.schedule, group, self.groups, self.stages)

    @property
    def per_round(self) -> int:
        """Microbatches that a chunk works on before the device turns to its next chunk."""
        return self.num_microbatches // max(1, self.num_microbatches // self.groups)


def _gpipe(shape: Shape, group: int) -> Indices:
    return _in_rounds(shape, group, shape.num_microbatches)


def _one_forward_one_backward(shape: Shape, group: int) -> Indices:
    return _in_rounds(shape, group, shape.groups - 1 - group)


def _interleaved(shape: Shape, group: int) -> Indices:
    return _in_rounds(shape, group, (shape.chunks - 1) * shape.per_round + 2 * (shape.groups - 1 - group))


def _zero_bubble(shape: Shape, group: int) -> Indices:
    """Half the distance ahead of interleaved 1F1B; weights are `group` microbatches behind their inputs."""
    ahead = (shape.chunks - 1) * shape.per_round + shape.groups - 1 - group
    return _in_rounds(shape, group, ahead, behind=group)


def _in_rounds(shape: Shape, group: int, ahead: int, behind: int | None = None) -> Indices:
    """Rounds of `per_round` microbatches through each chunk in turn: `ahead` forward passes, then one of each.

    With `behind` the pass of the weights of a microbatch follows that many backward passes after its own.
    """
    per_round, chunks = shape.per_round if shape.chunks > 1 else shape.num_microbatches, shape.chunks
    n = np.arange(shape.num_microbatches * chunks)
    chunk, microbatch = n // per_round % chunks, n // (per_round * chunks) * per_round + n % per_round
    forward, back = chunk * shape.groups + group, (chunks - 1 - chunk) * shape.groups + group
    parts = [
        (n - min(ahead, len(n)), forward, Kind.FORWARD),
        (n, back, Kind.BACKWARD if behind is None else Kind.INPUT),
    ]
    parts += [] if behind is None else [(n + behind, back, Kind.WEIGHT)]
    works = [np.stack([stage, microbatch, np.full_like(n, kind)], axis=1) for _, stage, kind in parts]
    turn = np.concatenate([3 * at + i for i, (at, _, _) in enumerate(parts)])
    return np.concatenate(works)[np.argsort(turn, kind="stable")].astype(np.intp)


_COUNTED = {Kind.BACKWARD: Kind.INPUT, Kind.JOINT: Kind.FORWARD}
"""Kinds that come in one line with another."""


class _Listed:
    """Operations listed one by one; the microbatches of each stage come in order."""

    def __init__(self, shape: Shape) -> None:
        self.found: list[tuple[int, int, int]] = []
        self._next = np.zeros((shape.stages, len(Kind)), dtype=np.intp).tolist()
        self.waiting: list[tuple[int, int]] = []

    def add(self, stage: int, *kinds: Kind) -> None:
        """The next microbatch of the stage through each of these passes."""
        for kind in kinds:
            counted = _COUNTED.get(kind, kind)
            microbatch = self._next[stage][counted]
            self._next[stage][counted] += 1
            if kind == Kind.INPUT:
                self.waiting.append((stage, microbatch))
            self.found.append((stage, microbatch, kind))

    def add_waiting(self) -> None:
        """The weights of the inputs that have waited longest, if any."""
        if self.waiting:
            self.found.append((*self.waiting.pop(0), Kind.WEIGHT))


def _zero_bubble_v(shape: Shape, group: int) -> Indices:
    """ZB-V, laid out for at least 2 p - 1 microbatches, of which those that aren't there are left out."""
    count = max(2 * shape.groups - 1, shape.num_microbatches)
    there, back = shape.stages_of(group)
    listed, left = _Listed(shape), shape.groups - group
    both = (Kind.INPUT, Kind.WEIGHT)
    for _ in range(2 * left - 1):
        listed.add(there, Kind.FORWARD)
    for _ in range(group):
        listed.add(back, Kind.FORWARD)
        listed.add(there, Kind.FORWARD)
    for _ in range(left):
        listed.add(back, Kind.FORWARD, *both)
    ahead = 2 * left - 1 + group
    for n in range(count - group - left):
        listed.add(there, *((Kind.FORWARD,) if ahead + n < count else ()), *both)
        listed.add(back, Kind.FORWARD, *both)
    for _ in range(group):
        listed.add(there, Kind.INPUT)
        listed.add(back, Kind.INPUT)
    for _ in range(left):
        listed.add(there, *both)
    for stage in (back, there):
        for _ in range(group):
            listed.add(stage, Kind.WEIGHT)
    found = np.array(listed.found, dtype=np.intp)
    return found[found[:, 1] < shape.num_microbatches]


def _dual_pipe_v(shape: Shape, group: int) -> Indices:
    """DualPipeV: both directions of the V at once, weights apart only where the pipeline fills and drains."""
    there, back = shape.stages_of(group)
    listed, left = _Listed(shape), shape.groups - 1 - group
    for _ in range(2 * left):
        listed.add(there, Kind.FORWARD)
    for _ in range(group + 1):
        listed.add(there, Kind.FORWARD)
        listed.add(back, Kind.FORWARD)
    for _ in range(left):
        listed.add(back, Kind.INPUT)
        listed.add_waiting()
        listed.add(back, Kind.FORWARD)
    for n in range(shape.num_microbatches - 2 * shape.groups + group + 1):
        listed.add(there, Kind.JOINT if left or n else Kind.FORWARD)  # at the turn the first ones run apart
        listed.add(back, Kind.BACKWARD)
        listed.add(back, Kind.JOINT)
        listed.add(there, Kind.BACKWARD)
    for _ in range(left):
        listed.add(back, Kind.BACKWARD)
        listed.add(back, Kind.JOINT)
        listed.add(there, Kind.BACKWARD)
    whole = group + 1  # of the last 2 (group + 1) backward passes the first half leaves nothing to wait
    for n in range(2 * (group + 1)):
        listed.add((back, there)[n % 2], Kind.BACKWARD if n < whole else Kind.INPUT)
    for _ in range(left):
        listed.add_waiting()
        listed.add(there, Kind.INPUT)
    for _ in range(group + 1):
        listed.add_waiting()
    return np.array(listed.found, dtype=np.intp)


ORDERS: dict[str, Callable[[Shape, int], Indices]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb": _zero_bubble,
    "zbv": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}


@lru_cache(maxsize=4096)
def order(shape: Shape, group: int) -> Indices:
    """The operations of a group in their order: the columns of `Work`, shape (operations, 3)."""
    found = ORDERS[shape.schedule](shape, group)
    found.setflags(write=False)
    return found


def works(shape: Shape, group: int) -> list[Work]:
    """The operations of a group in their order."""
    return [Work(stage, microbatch, Kind(kind)) for stage, microbatch, kind in order(shape, group).tolist()]
