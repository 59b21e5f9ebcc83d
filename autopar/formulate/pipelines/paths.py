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

At: TypeAlias = int | NDArray[np.intp]
"""Where a chunk begins or ends: a unit, or an array of units."""


class LeastPasses(NamedTuple):
    """Least seconds (n + 1,) of passes of a microbatch up to each unit: forward, backward, and back without weights."""

    forward: Floats
    backward: Floats
    inputs: Floats


class Work(Protocol):
    """What a group works at least, in seconds."""

    def __call__(self, once: bool, ahead: Sequence[int], late: Sequence[int]) -> Floats:
        """All but so many forward passes and passes of weights of each chunk; with what it does `once` a step."""
        ...


class Paths(NamedTuple):
    """Of one group: the longest path by itself, and the one whose start waits for the stages before it."""

    alone: Floats
    behind: Floats


def group_paths(
    shape: Shape, group: int, least: LeastPasses, starts: Sequence[At], ends: Sequence[At], work: Work
) -> Paths:
    """Paths of a group whose chunks are units `starts` to `ends` (numbers of units, arrays of one shape)."""
    turn, stages = turns(shape)[group], shape.stages_of(group)
    late = tuple(weights_behind(shape)[s] for s in stages)
    none = (0,) * shape.chunks
    first, back = starts[0], ends[stages.index(turn.stage)]
    there = least.forward[-1] + least.inputs[-1] - least.inputs[back]
    alone = [
        least.forward[first] + work(True, none, none),
        there + work(True, turn.ahead, none),
        there + least.inputs[first] + work(False, turn.ahead, late),
    ]
    return Paths(np.maximum.reduce(alone), work(False, none, late))


def left_out(
    count: int, all_of_it: Floats | float, passes: Sequence[Sequence[Floats]], ahead: Sequence[int], late: Sequence[int]
) -> Floats:
    """Seconds of a group's work on `count` microbatches, with passes left out of each chunk.

    `passes`: the least seconds of each chunk forward, backward, and back without weights.
    """
    most = max(*ahead, *late)
    if not most:
        return np.asarray(all_of_it)
    rest: Floats = np.sum(
        [
            (most - a) * forward + (most - w) * backward + w * inputs
            for (forward, backward, inputs), a, w in zip(passes, ahead, late, strict=True)
        ],
        axis=0,
    )
    if most == count:
        return np.where(np.isfinite(all_of_it), rest, np.inf)
    found: Floats = (1 - most / count) * all_of_it + rest
    return found
