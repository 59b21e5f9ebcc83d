"""Best-first search over scenarios."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.engine.search import MORE_WORTH, PATIENCE, SMALL, Outcome, Scenario, search


def scenario(name: str, bound: float, objective: float | None, solved: list[str] | None = None) -> Scenario[str]:
    """One whose best answer is `objective` (None: there is none); `solved` collects the names of those solved."""

    def solve(cutoff: float) -> tuple[float, str] | None:
        if solved is not None:
            solved.append(name)
        return None if objective is None or objective >= cutoff else (objective, name)

    return Scenario(name, lambda: bound, solve)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=8), st.integers(1, 4))
def test_top_answers_are_the_smallest(pairs: list[tuple[float, float]], top: int) -> None:
    """The answers are the smallest of all objectives (equal ones once the list is full apart), the bound is below."""
    scenarios = [scenario(str(i), bound, bound + more) for i, (bound, more) in enumerate(pairs)]
    answer = search(scenarios, top=top)
    wanted = sorted(bound + more for bound, more in pairs)[:top]
    assert answer.best is not None
    assert [f.objective for f in (answer.best, *answer.alternatives)] == wanted
    assert answer.lower_bound <= wanted[0]
    assert answer.outcome is Outcome.OPTIMAL


def test_stops_when_the_bound_passes() -> None:
    """c (bound 4) need not be solved once b has 3, and a (bound 1) comes first although it is listed last."""
    solved: list[str] = []
    answer = search([scenario("c", 4, 4, solved), scenario("b", 2, 3, solved), scenario("a", 1, 5, solved)])
    assert solved == ["a", "b"]
    assert answer.best is not None
    assert (answer.best.name, answer.solved, answer.bounded) == ("b", 2, 3)


def test_guesses_order_what_bounds_leave_open() -> None:
    """In large spaces, of scenarios with equal bounds the one with the least guess comes first; those that promise no
    gain are left out, but the bound is still that of all."""
    solved: list[str] = []
    guesses = {"a": 9.0, "b": 3.0, "c": 5.0}
    scenarios = [replace(scenario(name, 2, 4, solved), guess=partial(guesses.__getitem__, name)) for name in guesses]
    answer = search([*scenarios, *(scenario(str(i), 9, 9) for i in range(SMALL))])
    assert solved == ["b"]
    assert answer.lower_bound == 2


def test_small_spaces_are_searched_to_the_end() -> None:
    """Of no more than 64 scenarios every one is solved that may be better, whatever is guessed of it."""
    solved: list[str] = []
    scenarios = [replace(scenario(str(i), 2, 100 - i / 100, solved), guess=lambda: 200.0) for i in range(SMALL)]
    answer = search(scenarios)
    assert answer.best is not None
    assert (len(solved), answer.best.objective) == (SMALL, 100 - (SMALL - 1) / 100)


def test_scenarios_without_an_answer_cost_no_patience() -> None:
    """After a thousand scenarios that have none the first answer is still found."""
    answer = search([scenario(str(i), 1 + i / 1e6, 5 if i == 999 else None) for i in range(1000)])
    assert answer.best is not None
    assert answer.best.name == "999"


def test_answers_tell_what_others_alike_may_have() -> None:
    """In large spaces, where one's answer is twice its bound another like it isn't expected to be near its own; unlike
    ones are."""
    solved: list[str] = []
    alike = [replace(scenario(name, bound, 2 * bound, solved), like="x") for name, bound in (("a", 2), ("b", 3))]
    others = [scenario(str(i), 9, 9) for i in range(SMALL)]
    answer = search([*alike, scenario("c", 3.5, 3.8, solved), *others])
    assert solved == ["a", "c"]
    assert answer.best is not None
    assert (answer.best.name, answer.lower_bound) == ("c", 2)


def test_small_gains_are_passed_by_in_the_end() -> None:
    """Of 200 scenarios that promise 1 % at most, a part is solved; the bound is still that of all of them."""
    solved: list[str] = []
    answer = search([scenario(str(i), 99 + i / 1000, 100, solved) for i in range(200)])
    assert PATIENCE < len(solved) < PATIENCE + 2 + 0.01 / MORE_WORTH
    assert answer.lower_bound == 99


def test_nothing_found_names_the_knob() -> None:
    """Without an answer the outcome is infeasible, the bound inf, and the knob says what to turn."""
    answer = search([scenario("a", 1, None), scenario("b", np.inf, 1)])
    assert answer.best is None
    assert answer.outcome is Outcome.INFEASIBLE
    assert answer.lower_bound == np.inf
    assert "limit" in answer.knob


def test_deadline_keeps_the_best_so_far() -> None:
    """With no time at all one scenario is still solved, and the outcome says that the proof is missing."""
    answer = search([scenario("a", 1, 5), scenario("b", 2, 3)], time_limit_s=-1.0)
    assert answer.best is not None
    assert (answer.best.name, answer.outcome) == ("a", Outcome.FEASIBLE)


def test_equal_answers_keep_the_order() -> None:
    """Of two equal scenarios the first listed wins, every time."""
    for _ in range(3):
        answer = search([scenario("first", 1, 2), scenario("second", 1, 2)])
        assert answer.best is not None
        assert answer.best.name == "first"


def test_several_answers_are_of_different_kinds() -> None:
    """Of each kind (here the first letter) the best is kept, from whichever scenario, and those of one scenario too."""
    more = Scenario("c", lambda: 1.0, lambda _: (1.0, "a1"), others=lambda _: [(1.5, "a2"), (4.0, "b1")])
    scenarios = [more, scenario("a3", 0.5, 0.5), scenario("d1", 2.0, 5.0), scenario("b2", 3.0, 3.0)]
    answer = search(scenarios, top=3, kind=lambda payload: payload[0])
    assert answer.best is not None
    assert [f.payload for f in (answer.best, *answer.alternatives)] == ["a3", "b2", "d1"]
    only = search(scenarios, kind=lambda payload: payload[0])
    assert only.alternatives == ()
