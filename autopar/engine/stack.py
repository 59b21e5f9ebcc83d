"""The best stack under a byte limit: the shortest path where it fits; else the flows near a bound are listed, or an
integer program over counts solved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from autopar.engine.prune import without_dominated
from autopar.engine.stack_counts import fastest_counts
from autopar.engine.stack_ilp import fastest_flow, leanest_flow
from autopar.engine.stack_path import cheapest_path
from autopar.engine.stack_problem import (
    Flow,
    StackProblem,
    StackSolution,
    Status,
    moment_bytes,
    objective_s,
    ties_agree,
)
from autopar.engine.walk import walk


@dataclass(frozen=True)
class StackOptions:
    """How far to search.

    `relative_gap`: how near to its bound an answer counts as optimal. `cutoff_s`: stacks of this many seconds or more
    are of no interest. `want_peak`: whether an infeasible answer shall say the smallest peak that can be reached.
    """

    relative_gap: float = 1e-6
    time_limit_s: float | None = None
    cutoff_s: float = np.inf
    want_peak: bool = True


def solve_stack(problem: StackProblem, options: StackOptions = StackOptions()) -> StackSolution:
    """The fastest legal stack under the byte limit, with a proven lower bound."""
    end = None if options.time_limit_s is None else monotonic() + options.time_limit_s
    smaller, kept = without_dominated(problem)
    free = cheapest_path(smaller, [smaller.seconds(r) for r in range(len(smaller.runs))])
    if free is None:
        return StackSolution(Status.INFEASIBLE, np.inf, np.inf)
    bound_s = objective_s(smaller, free)
    if bound_s >= options.cutoff_s:
        return StackSolution(Status.CUT_OFF, np.inf, bound_s)
    if _fits(smaller, free) and ties_agree(smaller, free):
        solution = _answer(smaller, free, bound_s, options)
    else:
        solution = _by_counts(smaller, free, bound_s, options, end)
    walks = [tuple((int(rows[c]), n) for c, n in steps) for rows, steps in zip(kept, solution.walks, strict=False)]
    return replace(solution, walks=tuple(walks))


def _by_counts(
    problem: StackProblem, free: Flow, bound_s: float, options: StackOptions, end: float | None
) -> StackSolution:
    """List the flows near a bound; where there are too many, solve the integer program.

    A limit overstepped within the solver's tolerance is drawn tighter.
    """
    limit, cutoff_s = problem, options.cutoff_s - problem.fixed_s
    known = fastest_counts(problem, free, cutoff_s)
    while True:
        result = known or fastest_flow(limit, options.relative_gap, _left(end), cutoff_s)
        if limit is problem:
            bound_s = max(bound_s, result.bound + problem.fixed_s)
        if result.flow is None:
            break
        if _fits(problem, result.flow):
            return _answer(problem, result.flow, bound_s, options)
        limit = _tighter(limit, max(moment_bytes(problem, result.flow)) - (problem.limit_bytes or 0))
    if not result.complete:
        return StackSolution(Status.TIME_LIMIT, np.inf, bound_s)
    if np.isfinite(result.bound):
        return StackSolution(Status.CUT_OFF, np.inf, bound_s)
    return _leanest(problem, bound_s, options, end)


def _leanest(problem: StackProblem, bound_s: float, options: StackOptions, end: float | None) -> StackSolution:
    """What to say when nothing fits: the smallest peak, and when it is reached."""
    nothing = StackSolution(Status.INFEASIBLE, np.inf, np.inf)
    if problem.limit_bytes is None or not options.want_peak:
        return nothing
    flow = leanest_flow(problem, time_limit_s=_left(end)).flow
    if flow is None:
        return nothing
    if _fits(problem, flow):
        return _answer(problem, flow, bound_s, options)
    moments = moment_bytes(problem, flow)
    return replace(nothing, peak_bytes=max(moments))


def _answer(problem: StackProblem, flow: Flow, bound_s: float, options: StackOptions) -> StackSolution:
    seconds = objective_s(problem, flow)
    bound_s = min(bound_s, seconds)
    status = Status.OPTIMAL if seconds - bound_s <= options.relative_gap * seconds else Status.FEASIBLE
    moments = moment_bytes(problem, flow)
    walks = tuple(walk(r.choices, n, s) for r, n, s in zip(problem.runs, flow.counts, flow.starts, strict=True))
    return StackSolution(status, seconds, bound_s, walks, max(moments))


def _fits(problem: StackProblem, flow: Flow) -> bool:
    return problem.limit_bytes is None or max(moment_bytes(problem, flow)) <= problem.limit_bytes


def _tighter(problem: StackProblem, bytes_: int) -> StackProblem:
    return replace(problem, limit_bytes=(problem.limit_bytes or 0) - bytes_)


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - monotonic())
