"""Choices that can't be part of any better stack are left out before solving."""

from __future__ import annotations

import numpy as np

from autopar.engine.moments import Ints
from autopar.engine.stack_problem import Floats, StackProblem


def without_dominated(problem: StackProblem) -> tuple[StackProblem, tuple[Ints, ...]]:
    """The same problem without dominated choices and moments, and for each run which choices were kept.

    A choice is dominated by another of the same states and ties that is nowhere worse: neither in seconds nor in bytes
    at any moment. Of equal ones the first stays. The best seconds and the smallest peak stay the same.
    """
    ledger = problem.ledger.hardest()
    sizes = [np.concatenate(of).astype(np.float64) for of in zip(ledger.held, ledger.extra, strict=True)]
    kept = tuple(_undominated(problem, r, own) for r, own in enumerate(sizes))
    return problem.only(kept, ledger.take(kept)), kept


def _undominated(problem: StackProblem, run: int, sizes: Floats) -> Ints:
    choices = problem.runs[run].choices
    table = np.column_stack([problem.seconds(run), sizes.T])
    kinds = np.column_stack([choices.entry, choices.exit, choices.ties])
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    groups = [np.flatnonzero(kind == k) for k in range(kind.max(initial=-1) + 1)]
    return np.sort(np.concatenate([g[_pareto(table[g])] for g in groups] or [np.empty(0, dtype=np.int64)]))


def _pareto(table: Floats) -> Ints:
    """Rows of `table` that no other row undercuts in every column; the first of equal rows."""
    rows: list[int] = []
    front = np.empty_like(table)
    for row in np.lexsort(table.T[::-1]):
        if not (front[: len(rows)] <= table[row]).all(axis=1).any():
            front[len(rows)] = table[row]
            rows.append(int(row))
    return np.array(rows, dtype=np.int64)
