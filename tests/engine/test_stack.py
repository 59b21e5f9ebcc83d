"""The stack solver against brute force, and what must not grow with depth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.engine.errors import ProblemError
from autopar.engine.exhaustive import best_stack
from autopar.engine.moments import Backward
from autopar.engine.stack import StackOptions, solve_stack
from autopar.engine.stack_counts import fastest_counts
from autopar.engine.stack_ilp import StackProgram, fastest_flow
from autopar.engine.stack_path import cheapest_path
from autopar.engine.stack_problem import (
    Choices,
    Floats,
    Run,
    StackProblem,
    StackSolution,
    Status,
    moment_bytes,
    objective_s,
)
from tests.examples import examples


def random_choices(rng: np.random.Generator, count: int, states: int, ties: int) -> Choices:
    """Choices with small whole numbers of bytes, so that equal figures and tight fits are frequent."""
    few = rng.integers(0, 12, (8, count)) * rng.integers(0, 2, (8, 1))
    static, grad, saved, transient, step, update, put_off, parting = few
    reduced = grad - rng.integers(0, grad + 1)
    values = np.where(rng.random((count, ties)) < 0.5, rng.integers(0, 2, (count, ties)), -1)
    return Choices(
        rng.integers(0, states, count),
        rng.integers(0, states, count),
        rng.random(count),
        rng.random(count),
        static,
        grad,
        saved,
        transient,
        step,
        values,
        update,
        reduced,
        put_off,
        rng.integers(0, grad + 1),
        parting,
    )


@st.composite
def stack_problems(draw: st.DrawFn) -> StackProblem:
    """Two or three runs of one to four layers, two to five choices, in one or two chunks; a limit in half."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    states, ties, length = int(rng.integers(1, 4)), int(rng.integers(0, 3)), int(rng.integers(2, 4))
    chunks = sorted(rng.integers(0, 2, length).tolist())
    runs = tuple(
        Run(
            int(rng.integers(1, 7 - length)), random_choices(rng, int(rng.integers(2, 8 - length)), states, ties), chunk
        )
        for chunk in chunks
    )
    backwards = tuple(
        Backward(
            int(rng.integers(0, 2)),
            tuple(rng.integers(1, 4, 2).tolist()),
            tuple(rng.integers(0, 2, 2).astype(bool).tolist()),
            int(rng.integers(0, 9)),
            int(rng.integers(0, 3)),
            tuple(rng.integers(0, 3, 2).tolist()) if rng.random() < 0.5 else (),
            tuple(rng.integers(0, 2, 2).astype(bool).tolist()) if rng.random() < 0.5 else (),
        )
        for _ in range(int(rng.integers(1, 4)))
    )
    ends = [tuple(sorted(rng.permutation(states)[: rng.integers(1, states + 1)].tolist())) for _ in range(2)]
    limit = draw(st.none() | st.integers(5, 160))
    if chunks[-1] == 0 and rng.random() < 0.5:
        backwards = ()
    return StackProblem(runs, ends[0], ends[1], int(rng.integers(1, 4)), 0.25, 3, limit, backwards)


def flat(solution: StackSolution) -> list[list[int]]:
    """The choice of every layer of every run."""
    return [[c for c, n in steps for _ in range(n)] for steps in solution.walks]


def check_against_brute_force(problem: StackProblem) -> None:
    """Objective, status and smallest peak are those of trying every sequence of choices."""
    solution, optimum = solve_stack(problem), best_stack(problem)
    if optimum.objective_s is None:
        assert solution.status is Status.INFEASIBLE
        if problem.limit_bytes is not None:
            assert solution.peak_bytes == optimum.smallest_peak_bytes
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.objective_s == pytest.approx(optimum.objective_s, rel=1e-6)
        assert solution.lower_bound_s <= optimum.objective_s * (1 + 1e-12)


@examples(100)
@given(stack_problems())
def test_equals_brute_force(problem: StackProblem) -> None:
    """Answers are those of trying everything."""
    check_against_brute_force(problem)


@pytest.mark.slow
@examples(600)
@given(stack_problems())
def test_six_hundred_equal_brute_force(problem: StackProblem) -> None:
    """The same of 600 problems."""
    check_against_brute_force(problem)


@examples(100)
@given(stack_problems())
def test_listed_flows_equal_the_integer_program(problem: StackProblem) -> None:
    """Where the flows near the bound are listed, the fastest that fits takes as long as the integer program's."""
    free = cheapest_path(problem, [problem.seconds(r) for r in range(len(problem.runs))])
    listed = fastest_counts(problem, free, np.inf) if free else None
    if listed is not None and free is not None:
        program = fastest_flow(problem)
        assert (listed.flow is None) == (program.flow is None)
        if listed.flow is not None and program.flow is not None:
            assert objective_s(problem, listed.flow) == pytest.approx(objective_s(problem, program.flow), rel=1e-6)
            assert max(moment_bytes(problem, listed.flow)) <= (problem.limit_bytes or 0)


def test_walks_are_legal() -> None:
    """Walks have the run's length, neighbouring states match across runs, and the peak is within the limit."""
    problem = deep(80)
    peak = solve_stack(problem).peak_bytes
    assert peak is not None
    limited = replace(problem, limit_bytes=peak * 3 // 4)
    solution = solve_stack(limited)
    layers = [(run.choices, c) for run, picks in zip(problem.runs, flat(solution), strict=True) for c in picks]
    assert [len(picks) for picks in flat(solution)] == [run.count for run in problem.runs]
    assert all(a.exit[c] == b.entry[d] for (a, c), (b, d) in pairwise(layers))
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes is not None
    assert solution.peak_bytes <= peak * 3 // 4


def deep(count: int) -> StackProblem:
    """One run whose time falls as its bytes rise, between two single layers; three states."""
    rng = np.random.default_rng(3)

    def choices(n: int) -> Choices:
        saved = rng.integers(100, 1000, n)
        seconds: Floats = 100.0 / saved + rng.random(n) / 20
        none = np.zeros(n, dtype=np.int64)
        entry = rng.integers(0, 3, n)
        leaves = np.where(rng.random(n) < 0.2, rng.integers(0, 3, n), entry)
        return Choices(entry, leaves, seconds, np.zeros(n), saved // 2, none, saved, none, none)

    runs = (Run(1, choices(6)), Run(count, choices(40)), Run(1, choices(6)))
    return StackProblem(runs, (0, 1, 2), (0, 1, 2))


def test_program_does_not_grow_with_depth() -> None:
    """10 and 1000 layers make integer programs of the same numbers of rows and columns."""
    sizes = []
    for count in (10, 1000):
        program = StackProgram(deep(count), [np.zeros(len(run.choices)) for run in deep(count).runs])
        program.limit(10**6)
        sizes.append((program.mip.num_rows, program.mip.num_columns))
    assert sizes[0] == sizes[1]


def test_thousand_layers_keep_short_walks() -> None:
    """The free path through 1000 layers is a few groups of equal layers, not a list of 1000."""
    solution = solve_stack(deep(1000))
    assert sum(n for _, n in solution.walks[1]) == 1000
    assert len(solution.walks[1]) < 10


def test_same_problem_same_answer() -> None:
    """Solving twice gives the same walks, digit for digit the same objective."""
    problem = replace(deep(50), limit_bytes=(solve_stack(deep(50)).peak_bytes or 0) * 2 // 3)
    assert solve_stack(problem) == solve_stack(problem)


def test_limit_at_smallest_peak_is_feasible() -> None:
    """The smallest peak that an infeasible answer names is one that does fit, and a byte less does not."""
    least = solve_stack(replace(deep(12), limit_bytes=1)).peak_bytes
    assert least is not None
    assert solve_stack(replace(deep(12), limit_bytes=least)).status in (Status.OPTIMAL, Status.FEASIBLE)
    assert solve_stack(replace(deep(12), limit_bytes=least - 1)).status is Status.INFEASIBLE


def test_cutoff() -> None:
    """Below the optimum the cutoff is reported; above it the optimum is found as without."""
    problem = replace(deep(20), limit_bytes=(solve_stack(deep(20)).peak_bytes or 0) * 2 // 3)
    best = solve_stack(problem)
    assert solve_stack(problem, StackOptions(cutoff_s=best.objective_s * 0.999)).status is Status.CUT_OFF
    within = solve_stack(problem, StackOptions(cutoff_s=best.objective_s * 1.01))
    assert within.objective_s == pytest.approx(best.objective_s, rel=1e-6)


def test_loose_cycle_is_no_answer() -> None:
    """A cheap cycle of states that the path never touches can't stand in for layers of the path."""
    zero = np.zeros(3, dtype=np.int64)
    choices = Choices(
        np.array([0, 1, 2]), np.array([0, 2, 1]), np.array([5.0, 1.0, 1.0]), np.zeros(3), zero, zero, zero, zero, zero
    )
    heavy = replace(choices, saved_bytes=np.array([2, 1, 1]))
    problem = StackProblem((Run(4, heavy),), (0,), (0,), limit_bytes=7)
    assert solve_stack(problem).status is Status.INFEASIBLE
    assert solve_stack(problem).peak_bytes == 8


def test_malformed_columns_are_refused() -> None:
    """A column of another length is named, with both lengths."""
    good = deep(2).runs[0].choices
    with pytest.raises(ProblemError, match=r"saved_bytes has 5 rows, entry has 6"):
        replace(good, saved_bytes=good.saved_bytes[:5])
