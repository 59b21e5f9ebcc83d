"""Choices that can't be part of any better stack are left out before solving."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.engine.stack_problem import Floats, Ints, StackProblem


def without_dominated(problem: StackProblem) -> tuple[StackProblem, tuple[Ints, ...]]:
    """The same problem without dominated choices, and for each run which choices were kept.

    A choice is dominated by another of the same states and ties that is nowhere worse: neither in seconds nor in bytes
    at any moment. Of equal ones the first stays. The best seconds and the smallest peak stay the same.
    """
    held, extra = problem.held_bytes(), problem.extra_bytes()
    kept = tuple(
        _undominated(problem, r, [*(moment[r] for moment in held), *(of[r] for of in extra if r in of)])
        for r in range(len(problem.runs))
    )
    runs = tuple(replace(run, choices=run.choices.take(rows)) for run, rows in zip(problem.runs, kept, strict=True))
    return replace(problem, runs=runs), kept


def _undominated(problem: StackProblem, run: int, sizes: Iterable[Ints]) -> Ints:
    choices = problem.runs[run].choices
    figures = [problem.seconds(run), *sizes]
    table = np.unique(np.stack([np.asarray(f, dtype=np.float64) for f in figures], axis=1), axis=1)
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
