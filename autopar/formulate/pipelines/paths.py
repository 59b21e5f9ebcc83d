"""Seconds that no step of a pipeline can beat: paths through its passes, each as long as all that lies on it.

A schedule says in which order each group of devices works, and each pass waits for the one before it on its device and
for its input. What a group does from one pass on to another, with the way there and the way on, is such a path; of each
group these are looked at (f, i, w: a forward pass, and the two halves of a backward pass, of which w is 0 where passes
are whole; m microbatches):

- from its first forward pass, which waits for those of the stages before, through all of its work and once a step;
- the same as far as its last gradient, which goes back through the stages before;
- from its first backward pass, which waits for a forward pass through all stages and for gradients of those behind,
  through what is left of its work; and the same again as far as its last gradient.

What a group works when a forward and l passes of weights of a chunk are left out, (m - a) f + m i + (m - l) w, comes in
two parts. With r = max(a, l) / m it is (1 - r) of all its work and (r m - a) f + (r m - l) (i + w) + l i. Of all work
there are bounds under a limit of bytes; of the passes apart, the least of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost.orders import Shape
from autopar.cost.schedule import turns, weights_behind
from autopar.engine.stack_problem import Floats

Ints: TypeAlias = NDArray[np.intp]


class LeastPasses(NamedTuple):
    """Least seconds (n + 1,) of passes of a microbatch up to each unit: forward, backward, and back without weights."""

    forward: Floats
    backward: Floats
    inputs: Floats

    def of(self, start: Ints, end: Ints) -> tuple[Floats, Floats, Floats]:
        """Of units `start` to `end` - 1."""
        forward, backward, inputs = (up_to[end] - up_to[start] for up_to in self)
        return forward, backward, inputs


class Work(Protocol):
    """What each group works at least, in seconds (groups, ...)."""

    def __call__(self, once: bool, ahead: Ints, late: Ints) -> Floats:
        """All but so many forward passes and passes of weights (groups, chunks), with what it does `once` a step."""
        ...


class Paths(NamedTuple):
    """Of each group (groups, ...): the longest path by itself, and the one whose start waits for the stages before."""

    alone: Floats
    behind: Floats


def group_paths(shape: Shape, least: LeastPasses, starts: Ints, ends: Ints, work: Work) -> Paths:
    """Paths of the groups, whose chunks are units `starts` to `ends` (groups or 1, chunks, ...)."""
    turn, late = turns(shape), _late(shape)
    none = np.zeros_like(late)
    first = starts[:, 0]
    chunk = turn.chunk.reshape(-1, *[1] * (ends.ndim - 1))
    back = np.take_along_axis(np.broadcast_to(ends, (shape.groups, *ends.shape[1:])), chunk, axis=1)[:, 0]
    there = least.forward[-1] + least.inputs[-1] - least.inputs[back]
    alone = np.maximum(least.forward[first] + work(True, none, none), there + work(True, turn.ahead, none))
    as_far = there + least.inputs[first] + work(False, turn.ahead, late)
    return Paths(np.maximum(alone, as_far), work(False, none, late))


def _late(shape: Shape) -> Ints:
    """(groups, chunks): weights that come after the last gradient has gone on."""
    late = weights_behind(shape)
    return np.array([[late[s] for s in shape.stages_of(g)] for g in range(shape.groups)])


def left_out(
    count: int, all_of_it: Floats, passes: Sequence[tuple[Floats, Floats, Floats]], ahead: Ints, late: Ints
) -> Floats:
    """Seconds of groups' work on `count` microbatches, with passes left out of each chunk.

    `passes`: the least seconds of each chunk forward, backward, and back without weights (groups or 1, ...).
    """
    if not (ahead.any() or late.any()):
        return all_of_it
    room = (-1, *[1] * (all_of_it.ndim - 1))
    most = np.maximum(ahead, late).max(axis=1).reshape(room)
    rest = np.zeros(1)
    for c, (forward, backward, inputs) in enumerate(passes):
        a, w = ahead[:, c].reshape(room), late[:, c].reshape(room)
        rest = rest + (most - a) * forward + (most - w) * backward + w * inputs
    legal = np.isfinite(all_of_it)
    return np.where(legal, (1 - most / count) * np.where(legal, all_of_it, 0.0) + rest, np.inf)
