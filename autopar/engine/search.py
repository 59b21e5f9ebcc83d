"""Over scenarios: bound all, solve in order of promise until none is below the best answer (best-first search).

A. H. Land, A. G. Doig, "An automatic method of solving discrete programming problems", 1960, with one level of
branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from time import monotonic
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


SMALL = 64
"""Spaces of no more scenarios are searched to the end."""
LIKELY, ALIKE = 0.9, 0.002
"""Of what an answer is above its scenario's bound others alike are expected to be above theirs by the first share, and
by ever more of it the more of them have been solved; a gain below the second isn't looked for among them."""
FURTHER = 1.03
"""Up to this many times the cutoff answers are worth knowing: they tell what others alike may be expected to have."""
PATIENCE, MORE_WORTH, MOST_WORTH = 16, 0.0015, 0.02
"""In larger spaces: scenarios solved beside the first answer before small gains are passed by, by how much the least
gain grows with each one more, and how large it becomes."""


class Outcome(Enum):
    """OPTIMAL: nothing is better than the answer by more than the gap; FEASIBLE: time ran out; INFEASIBLE: no answer.

    TIME_LIMIT: time ran out before any answer.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class Found(Generic[Payload]):
    """The best answer of one scenario."""

    name: str
    objective: float
    payload: Payload


@dataclass(frozen=True)
class Scenario(Generic[Payload]):
    """A part of the space. `bound()`: nothing in it is below that. `solve(cutoff)`: its best answer, None if there is
    none below `cutoff`, or one not far above it. `quick` is a bound that costs nothing, `rough` are ever better ones
    cheaper than `bound`. `guess()`: about what `solve` would find, asked for before it; a scenario is not solved where
    that isn't below the best answer. Scenarios `like` one another are expected to have answers as far above their
    bounds. `others(cutoff)`: further answers that may be of other kinds, asked for when several are wanted."""

    name: str
    bound: Callable[[], float]
    solve: Callable[[float], tuple[float, Payload] | None]
    quick: float = 0.0
    rough: tuple[Callable[[], float], ...] = ()
    guess: Callable[[], float] | None = None
    like: Hashable = None
    others: Callable[[float], Sequence[tuple[float, Payload]]] | None = None

    @property
    def bounds(self) -> tuple[Callable[[], float], ...]:
        """Ever better bounds."""
        return (*self.rough, self.bound)

    @property
    def looks(self) -> tuple[Callable[[], float], ...]:
        """Bounds, and the guess if there is one: what a scenario promises, ever more truly."""
        return self.bounds if self.guess is None else (*self.bounds, self.guess)


@dataclass(frozen=True)
class Answer(Generic[Payload]):
    """`best` first, then others from different scenarios. `lower_bound` is proven for the whole space.

    `bounded` and `solved` count scenarios, `bounds` are what is proven of each; `knob` says what to turn when there is
    no answer.
    """

    outcome: Outcome
    best: Found[Payload] | None
    alternatives: tuple[Found[Payload], ...]
    lower_bound: float
    bounded: int
    solved: int
    knob: str = ""
    bounds: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        """Share of the objective that is not proven necessary."""
        return (self.best.objective - self.lower_bound) / self.best.objective if self.best else inf


def search(
    scenarios: Sequence[Scenario[Payload]],
    *,
    top: int = 1,
    kind: Callable[[Payload], Hashable] | None = None,
    time_limit_s: float | None = None,
    below: float = inf,
    thorough: bool | None = None,
    look: Callable[[int, int], float] | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Answer[Payload]:
    """The `top` best answers, each of another `kind`, or else scenario. Equal ones keep the order of the scenarios.

    Answers that aren't `below` a figure are left out, and so is a scenario that promises less than `worth` unless the
    search is `thorough` (None: in small spaces); the bound is that of all. `look(i, n)` says what the n-th of the
    `looks` of scenario i shows, if somebody else takes them.
    After `time_limit_s` the best answer so far is given; at least one scenario is always solved. `progress` is told
    what is done (`bound`, `solve`), how many scenarios are and how many there are at most.
    """
    end = inf if time_limit_s is None else monotonic() + time_limit_s
    bounds = [scenario.quick for scenario in scenarios]
    heap = [(bound, 0, i) for i, bound in enumerate(bounds)]
    heapify(heap)
    found: list[Found[Payload]] = []
    above: dict[Hashable, float] = {}
    alike: Counter[Hashable] = Counter()
    large = is_large(len(scenarios), thorough)
    bounded = solved = further = 0
    complete = True
    while heap:
        bound, level, i = heappop(heap)
        better = (scenarios[i].looks if large else scenarios[i].bounds)[level:]
        cutoff = found[top - 1].objective if len(found) >= top else below
        if bound >= cutoff * (1 - worth(further) * large) or bound == inf:
            break
        late = monotonic() > end
        if solved and late:
            complete = False
            break
        if better and not (late and bounded):
            promise = max(bound, better[0]() if look is None else look(i, level))
            if level < len(scenarios[i].bounds):
                bounds[i] = promise
            bounded += level == 0
            progress("bound", bounded, len(scenarios))
            heappush(heap, (promise, level + 1, i))
            continue
        if not level and any(known and b < inf for b, known, _ in heap):
            complete = False  # there is no time to bound it: solve one of those that are bounded
            continue
        like = scenarios[i].like
        promise = bounds[i] * (_expected(above[like], alike[like]) if like in above else 1.0)
        if promise > bound and large:
            heappush(heap, (promise, level, i))
            continue
        result = scenarios[i].solve(cutoff)
        alike[like] += 1
        if result is not None and like is not None:
            above[like] = min(above.get(like, inf), result[0] / bounds[i] - 1 if bounds[i] else 0.0)
        solved += 1
        further += bool(found)
        progress("solve", solved, len(scenarios))
        results = [] if result is None else [result]
        if top > 1 and (others := scenarios[i].others) is not None:
            results += others(cutoff)
        new = [Found(scenarios[i].name, *r) for r in results if r[0] < cutoff]
        found = _best_of_kinds([*found, *new], kind)[:top]
    return _answer(found, bounds, solved, complete)


def is_large(scenarios: int, thorough: bool | None = None) -> bool:
    """Whether small gains are passed by in a search over so many."""
    return scenarios > SMALL if thorough is None else not thorough


def _expected(above: float, solved: int) -> float:
    """How many times its bound a scenario's answer is likely to be, where answers alike are by so much above theirs."""
    likely: float = LIKELY ** (1 / solved)
    return 1 + likely * above + ALIKE


def worth(further: int) -> float:
    """The least gain, as a share of the objective, for which one more scenario is solved in a large space.

    None at first; then the more have been solved beside the first answer the more is asked. The lower bound is that of
    the whole space all the same.
    """
    return min(MOST_WORTH, max(0.0, MORE_WORTH * (further - PATIENCE)))


def _best_of_kinds(found: Sequence[Found[Payload]], kind: Callable[[Payload], Hashable] | None) -> list[Found[Payload]]:
    """Sorted by objective, of each kind the first."""
    ordered = sorted(found, key=lambda f: f.objective)
    if kind is None:
        return ordered
    first: dict[Hashable, Found[Payload]] = {}
    for one in ordered:
        first.setdefault(kind(one.payload), one)
    return list(first.values())


def _answer(found: list[Found[Payload]], bounds: list[float], solved: int, complete: bool) -> Answer[Payload]:
    bounded = sum(isfinite(b) for b in bounds)
    lower, each = max(0.0, min(bounds, default=inf)), tuple(bounds)
    if found:
        outcome = Outcome.OPTIMAL if complete else Outcome.FEASIBLE
        return Answer(outcome, found[0], tuple(found[1:]), lower, bounded, solved, bounds=each)
    if complete:
        knob = "raise the limit, or drop a constraint"
        return Answer(Outcome.INFEASIBLE, None, (), inf, bounded, solved, knob, each)
    return Answer(Outcome.TIME_LIMIT, None, (), lower, bounded, solved, "raise the time limit", each)


def joined(
    first: Answer[Payload],
    further: Answer[Payload],
    top: int = 1,
    kind: Callable[[Payload], Hashable] | None = None,
) -> Answer[Payload]:
    """The answer of a search and one over further scenarios, for answers below those of the first."""
    found = _best_of_kinds([f for a in (first, further) if a.best for f in (a.best, *a.alternatives)], kind)[:top]
    if not found:
        return first
    cut = {first.outcome, further.outcome} & {Outcome.FEASIBLE, Outcome.TIME_LIMIT}
    return Answer(
        Outcome.FEASIBLE if cut else Outcome.OPTIMAL, found[0], tuple(found[1:]),
        max(0.0, min((first.lower_bound, *further.bounds))), first.bounded + further.bounded,
        first.solved + further.solved, bounds=(*first.bounds, *further.bounds),
    )  # fmt: skip
