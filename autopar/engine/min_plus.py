"""Cheapest ways through a chain of runs of equal steps, for many weightings at once.

Doubling (as in all-pairs shortest paths by repeated squaring) makes the work grow with the logarithm of a run's count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from autopar.engine.moments import Ints
from autopar.engine.stack_problem import Floats

Place: TypeAlias = tuple[int, ...]
"""One of the weightings: an index for each leading dim."""


class Way(NamedTuple):
    """For each run the state in front of it, and how often each step (from state, to state) is taken."""

    starts: tuple[int, ...]
    steps: tuple[Counter[tuple[int, int]], ...]


@dataclass(frozen=True, eq=False)
class Ways:
    """The cheapest ways under all weightings: `totals` (lead dims) is inf where there is none."""

    totals: Floats
    _powers: list[_Powers]
    _taken: list[tuple[int, int, Ints]]
    _ends: Ints

    def way(self, place: Place) -> Way:
        """The way that costs `totals[place]`, which must be finite."""
        state = int(self._ends[place])
        starts = [0] * len(self._powers)
        steps: list[Counter[tuple[int, int]]] = [Counter() for _ in self._powers]
        for r, bit, parents in reversed(self._taken):
            before = int(parents[(*place, state)])
            steps[r] += self._powers[r].steps(place, bit, before, state)
            starts[r] = state = before
        return Way(tuple(starts), tuple(steps))


def cheapest_ways(counts: Sequence[int], matrices: Sequence[Floats], entry: Floats, exit_: Floats) -> Ways:
    """The cheapest ways to take `counts[r]` steps in each run r in turn.

    `matrices[r]` (lead dims, S, S) are the costs of a step from state to state, inf where there is none; lead dims of
    size 1 are those that make no difference. `entry` and `exit_` (S,) are costs of the first and the last state.
    """
    powers = [_Powers(matrix) for matrix in matrices]
    lead = np.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    cost = np.broadcast_to(entry, (*lead, len(entry)))
    taken: list[tuple[int, int, Ints]] = []
    for r, count in enumerate(counts):
        for bit in (b for b in range(count.bit_length()) if count >> b & 1):
            sums = cost[..., :, None] + powers[r].matrix(bit)
            taken.append((r, bit, sums.argmin(axis=-2)))
            cost = sums.min(axis=-2)
    cost = cost + exit_
    return Ways(cost.min(axis=-1), powers, taken, cost.argmin(axis=-1))


class _Powers:
    """Min-plus powers 1, 2, 4, ... of one run's matrices."""

    def __init__(self, first: Floats) -> None:
        self._matrices = [first]
        self._middles: list[Ints] = []

    def matrix(self, bit: int) -> Floats:
        """(lead dims, S, S): least cost of 2**bit steps from state to state."""
        while len(self._matrices) <= bit:
            last = self._matrices[-1]
            sums = last[..., :, :, None] + last[..., None, :, :]
            self._middles.append(sums.argmin(axis=-2))
            self._matrices.append(sums.min(axis=-2))
        return self._matrices[bit]

    def steps(self, place: Place, bit: int, start: int, end: int) -> Counter[tuple[int, int]]:
        """How often each step is taken in the cheapest way of 2**bit steps from `start` to `end`."""
        own = tuple(min(i, n - 1) for i, n in zip(place, self._matrices[0].shape[:-2], strict=True))
        pairs = Counter({(start, end): 1})
        for middles in reversed(self._middles[:bit]):
            halves: Counter[tuple[int, int]] = Counter()
            for (a, b), times in pairs.items():
                middle = int(middles[(*own, a, b)])
                halves[a, middle] += times
                halves[middle, b] += times
            pairs = halves
        return pairs
