"""The best stack without a byte limit: the cheapest way over states, of the choices between two states the lightest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.engine.min_plus import cheapest_ways
from autopar.engine.moments import Ints
from autopar.engine.stack_problem import Choices, Floats, Flow, StackProblem


def cheapest_path(problem: StackProblem, weights: Sequence[Floats]) -> Flow | None:
    """The legal stack of least total weight (`weights[r]`: (C,)), ties ignored; None if there is none."""
    states = problem.states
    matrices, lightest = zip(
        *(_matrix(run.choices, w, states) for run, w in zip(problem.runs, weights, strict=True)), strict=True
    )
    ends = (allowed(problem.entry_states, states), allowed(problem.exit_states, states))
    found = cheapest_ways([run.count for run in problem.runs], matrices, *ends)
    if not np.isfinite(found.totals):
        return None
    way = found.way(())
    counts = [np.zeros(len(run.choices), dtype=np.int64) for run in problem.runs]
    for r, steps in enumerate(way.steps):
        for step, times in steps.items():
            counts[r][lightest[r][step]] += times
    return Flow(tuple(counts), way.starts)


def _matrix(choices: Choices, weights: Floats, states: int) -> tuple[Floats, Ints]:
    """(S, S): the least weight of a choice from state to state, and that choice, the first of equal ones."""
    least = np.full((states, states), np.inf)
    lightest = np.full((states, states), -1, dtype=np.int64)
    order = np.lexsort((-np.arange(len(weights)), -weights))
    least[choices.entry[order], choices.exit[order]] = weights[order]
    lightest[choices.entry[order], choices.exit[order]] = order
    return least, lightest


def allowed(states: Sequence[int], count: int) -> Floats:
    """(S,): 0 for allowed states, else inf."""
    found = np.full(count, np.inf)
    found[[s for s in states if s < count]] = 0.0
    return found
