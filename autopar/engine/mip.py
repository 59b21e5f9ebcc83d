"""A mixed-integer program assembled from arrays and handed to a solver of OR-Tools as one message."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from time import monotonic
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

Columns: TypeAlias = NDArray[np.intp]
Floats: TypeAlias = NDArray[np.float64]

FIRST_COLUMNS = 30
"""How many columns beyond the relaxation's own are tried first (30 was fastest of 30, 80 and 150)."""
LARGEST_COST = 100.0
"""Costs are scaled to this, so that the solvers' absolute tolerances are small against the objective."""


@dataclass(frozen=True, eq=False)
class MipResult:
    """`values` is None without a solution; `bound` is proven (inf when infeasible); `complete` unless time ran out."""

    values: Floats | None
    objective: float
    bound: float
    complete: bool


@dataclass(frozen=True, eq=False)
class _Block:
    """Columns added together."""

    upper: Floats
    cost: Floats
    integer: bool


def _first_slack(reduced: Floats, least: float) -> float:
    """The reduced cost up to which columns are tried first."""
    priced = np.sort(reduced[reduced > least])
    return float(priced[FIRST_COLUMNS]) if len(priced) > FIRST_COLUMNS else np.inf


class _Clock:
    def __init__(self, limit_s: float | None) -> None:
        self._end = None if limit_s is None else monotonic() + limit_s

    def left(self) -> timedelta | None:
        return None if self._end is None else timedelta(seconds=max(0.0, self._end - monotonic()))


class Mip:
    """Minimise a linear function over columns within bounds, subject to rows within bounds."""

    def __init__(self) -> None:
        self._columns: list[_Block] = []
        self._rows: list[tuple[Floats, Floats]] = []
        self._entries: list[tuple[Columns, Columns, Floats]] = []
        self.num_columns = 0
        self.num_rows = 0

    def columns(self, count: int, upper: ArrayLike, cost: ArrayLike = 0.0, integer: bool = False) -> Columns:
        """Add `count` columns from 0 to `upper`; returns their indices."""
        full = [np.broadcast_to(np.asarray(x, dtype=np.float64), count) for x in (upper, cost)]
        self._columns.append(_Block(full[0], full[1], integer))
        self.num_columns += count
        return np.arange(self.num_columns - count, self.num_columns)

    def rows(self, count: int, lower: float, upper: float) -> Columns:
        """Add `count` empty rows with bounds; returns their indices for `entries`."""
        self._rows.append((np.full(count, lower), np.full(count, upper)))
        self.num_rows += count
        return np.arange(self.num_rows - count, self.num_rows)

    def entries(self, rows: ArrayLike, columns: ArrayLike, values: ArrayLike) -> None:
        """Add `values` to the matrix at (rows, columns), broadcast against each other; entries of one place add up."""
        r, c, v = np.broadcast_arrays(np.asarray(rows), np.asarray(columns), np.asarray(values, dtype=np.float64))
        self._entries.append((r.ravel(), c.ravel(), v.ravel()))

    def solve(
        self,
        relative_gap: float = 1e-6,
        time_limit_s: float | None = None,
        cutoff: float = np.inf,
        repair: Callable[[Floats], bool] | None = None,
    ) -> MipResult:
        """The least value to within `relative_gap`; answers of `cutoff` or more are of no interest.

        First the relaxation; then the program over the columns of small reduced cost only. An answer that is no
        further above the relaxation than any column left out proves itself; else those it does not rule out come back.
        `repair(values)` may add rows that an answer breaks; it then says True, and the answer is dropped.
        """
        clock = _Clock(time_limit_s)
        relaxed, reduced = self._relaxation(clock)
        floor = relaxed.objective
        if relaxed.values is None or not relaxed.complete or floor >= cutoff:
            return replace(relaxed, values=None, objective=np.inf)
        rests = self._integers() & (relaxed.values < 1e-9)
        slack = min(_first_slack(reduced[rests], 1e-9 * abs(floor)), cutoff - floor)
        while True:
            result = self._integer(rests & (reduced > slack), relative_gap, clock)
            if repair is not None and result.values is not None and repair(result.values):
                continue
            result = replace(result, bound=max(floor, min(result.bound, floor + slack)))
            if result.objective >= cutoff:
                result = replace(result, values=None, objective=np.inf)
            close = result.objective - result.bound <= relative_gap * abs(result.objective) < np.inf
            if close or not result.complete or floor + slack >= min(cutoff, result.objective):
                return result
            slack = min(result.objective, cutoff) - floor

    def _integers(self) -> NDArray[np.bool_]:
        return np.concatenate([np.full(len(block.upper), block.integer) for block in self._columns])

    def _relaxation(self, clock: _Clock) -> tuple[MipResult, Floats]:
        """The linear relaxation, and the least its objective rises by for each unit of a column that rests at 0."""
        model = mathopt.Model.from_model_proto(self._proto(np.zeros(self.num_columns, dtype=bool), relaxed=True))
        answer = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(time_limit=clock.left()))
        result = self._read(model, answer)
        if result.values is None or not result.complete:
            return result, np.zeros(self.num_columns)
        return result, np.array(answer.reduced_costs(list(model.variables()))) * self._cost_unit()

    def _integer(self, closed: NDArray[np.bool_], relative_gap: float, clock: _Clock) -> MipResult:
        parameters = mathopt.SolveParameters(
            relative_gap_tolerance=relative_gap / 2, absolute_gap_tolerance=0.0, random_seed=1, time_limit=clock.left()
        )
        model = mathopt.Model.from_model_proto(self._proto(closed))
        with own_words_to_stderr():
            answer = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        return self._read(model, answer)

    def _read(self, model: mathopt.Model, answer: mathopt.SolveResult) -> MipResult:
        reason = answer.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return MipResult(None, np.inf, np.inf, True)
        bound = answer.termination.objective_bounds.dual_bound * self._cost_unit()
        complete = reason == mathopt.TerminationReason.OPTIMAL
        if not answer.has_primal_feasible_solution():
            return MipResult(None, np.inf, bound, complete)
        values = np.array(answer.variable_values(list(model.variables())))
        return MipResult(values, answer.objective_value() * self._cost_unit(), bound, complete)

    def _cost_unit(self) -> float:
        """What costs are divided by, so that the solvers' absolute tolerances are small against them."""
        largest = max(float(np.abs(block.cost).max(initial=0.0)) for block in self._columns)
        return (largest or LARGEST_COST) / LARGEST_COST

    def _proto(self, closed: NDArray[np.bool_], relaxed: bool = False) -> model_pb2.ModelProto:
        """The program with the `closed` columns fixed at 0."""
        proto = model_pb2.ModelProto()
        upper = np.where(closed, 0.0, np.concatenate([c.upper for c in self._columns]))
        cost = np.concatenate([c.cost for c in self._columns]) / self._cost_unit()
        variables = proto.variables
        variables.ids.extend(range(self.num_columns))
        variables.lower_bounds.extend([0.0] * self.num_columns)
        variables.upper_bounds.extend(upper.tolist())
        for block in self._columns:
            variables.integers.extend([block.integer and not relaxed] * len(block.upper))
        used = np.flatnonzero(cost)
        proto.objective.linear_coefficients.ids.extend(used.tolist())
        proto.objective.linear_coefficients.values.extend(cost[used].tolist())
        constraints = proto.linear_constraints
        constraints.ids.extend(range(self.num_rows))
        constraints.lower_bounds.extend(np.concatenate([r[0] for r in self._rows]).tolist())
        constraints.upper_bounds.extend(np.concatenate([r[1] for r in self._rows]).tolist())
        rows, columns, values = self._matrix()
        proto.linear_constraint_matrix.row_ids.extend(rows.tolist())
        proto.linear_constraint_matrix.column_ids.extend(columns.tolist())
        proto.linear_constraint_matrix.coefficients.extend(values.tolist())
        return proto

    def _matrix(self) -> tuple[Columns, Columns, Floats]:
        """Entries in row-major order, those of one place added up."""
        rows, columns, values = (np.concatenate([e[i] for e in self._entries]) for i in range(3))
        places, inverse = np.unique(rows * self.num_columns + columns, return_inverse=True)
        total = np.bincount(inverse, weights=values, minlength=len(places))
        kept = total != 0
        return places[kept] // self.num_columns, places[kept] % self.num_columns, total[kept]


@contextmanager
def own_words_to_stderr() -> Iterator[None]:
    """HiGHS prints a line now and then, whatever it is told: standard output is for answers alone."""
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which would else be written out later
        os.dup2(kept, 1)
        os.close(kept)
