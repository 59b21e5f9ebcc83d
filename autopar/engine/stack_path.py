"""The best stack without a byte limit: a shortest path over states, each run by min-plus powers of its matrix.

Doubling (as in all-pairs shortest paths by repeated squaring) makes the work grow with the logarithm of a run's count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.engine.stack_problem import Floats, Flow, Ints, StackProblem


def cheapest_path(problem: StackProblem, weights: Sequence[Floats]) -> Flow | None:
    """The legal stack of least total weight (`weights[r]`: (C,)), ties ignored; None if there is none."""
    states = problem.states
    cost = np.where(np.isin(np.arange(states), problem.entry_states), 0.0, np.inf)
    powers = [_Powers(r.choices.entry, r.choices.exit, w, states) for r, w in zip(problem.runs, weights, strict=True)]
    steps: list[tuple[int, int, Ints]] = []
    for r, run in enumerate(problem.runs):
        for bit in (b for b in range(run.count.bit_length()) if run.count >> b & 1):
            sums = cost[:, None] + powers[r].matrix(bit)
            steps.append((r, bit, sums.argmin(axis=0)))
            cost = sums.min(axis=0)
    cost = np.where(np.isin(np.arange(states), problem.exit_states), cost, np.inf)
    state = int(cost.argmin())
    if not np.isfinite(cost[state]):
        return None
    counts = [np.zeros(len(run.choices), dtype=np.int64) for run in problem.runs]
    starts = [0] * len(problem.runs)
    for r, bit, parents in reversed(steps):
        before = int(parents[state])
        counts[r] += powers[r].counts(bit, before, state)
        starts[r] = state = before
    return Flow(tuple(counts), tuple(starts))


class _Powers:
    """Min-plus powers 1, 2, 4, ... of one run's state matrix, with the choices that reach them."""

    def __init__(self, entry: Ints, exit_: Ints, weights: Floats, states: int) -> None:
        first = np.full((states, states), np.inf)
        self._choice = np.full((states, states), -1, dtype=np.int64)
        order = np.lexsort((-np.arange(len(weights)), -weights))
        first[entry[order], exit_[order]] = weights[order]
        self._choice[entry[order], exit_[order]] = order
        self._size = len(weights)
        self._matrices = [first]
        self._middles: list[Ints] = []
        self._counts: dict[tuple[int, int, int], Ints] = {}

    def matrix(self, bit: int) -> Floats:
        """(S, S): least weight of 2**bit layers from state to state."""
        while len(self._matrices) <= bit:
            last = self._matrices[-1]
            sums = last[:, :, None] + last[None, :, :]
            self._middles.append(sums.argmin(axis=1))
            self._matrices.append(sums.min(axis=1))
        return self._matrices[bit]

    def counts(self, bit: int, start: int, end: int) -> Ints:
        """(C,): how often each choice stands in the lightest way of 2**bit layers from `start` to `end`."""
        key = (bit, start, end)
        if key not in self._counts:
            self._counts[key] = self._count(*key)
        return self._counts[key]

    def _count(self, bit: int, start: int, end: int) -> Ints:
        if bit == 0:
            return np.bincount([self._choice[start, end]], minlength=self._size)
        middle = int(self._middles[bit - 1][start, end])
        total: Ints = self.counts(bit - 1, start, middle) + self.counts(bit - 1, middle, end)
        return total
