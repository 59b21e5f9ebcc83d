"""The stack problem by listing all flows near a bound: what most stages come to, as few choices matter for each.

With a price on the bytes of the moment that is hardest the cheapest path bounds all flows (Lagrangian relaxation), and
a flow of no more than so many seconds has no more than what is left of them in *reduced costs*, its choices' excess
over the cheapest path. Flows within a budget are listed as counts of choices; the budget grows until one is found that
fits, which is then the fastest (A. Lodi et al. call it fixing by reduced costs). The largest temporary is guessed: each
level it may have is a problem of its own, in which only choices up to it are allowed and it is held in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.engine.ledger import NOTHING
from autopar.engine.min_plus import cheapest_ways
from autopar.engine.moments import Ints
from autopar.engine.stack_path import allowed
from autopar.engine.stack_problem import Choices, Floats, Flow, FlowResult, StackProblem, ties_agree
from autopar.engine.walk import unreached_states

MOST_FLOWS = 1 << 14
"""Flows listed at once; where there are more the problem is for an integer program."""
MOST_PRICES = 48
FIRST_BUDGET, FURTHER_BUDGET = 1e-2, 4.0
"""Budget over the bound as a share of it, and by how much it grows."""
STEP = 4e-3
"""Share of the limit by which temporaries may differ that are taken for one level."""
SMALL, ROUNDING = 1e-6, 1e-9
"""Share of the limit that is worth all seconds at the highest price; share by which sums of seconds may be off."""


class TooMany(Exception):
    """There are more flows than are listed."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A level of the largest temporary with its best price: `bound_s`, and costs (C,) of each run's choices."""

    bound_s: float
    besides_s: float
    costs: list[Floats]


class Listed(NamedTuple):
    """Ways through some runs: the states that they lead to, seconds, cost at the price, bytes and largest temporaries
    (N, K), and for each run which of its ways they take."""

    first: Ints
    last: Ints
    seconds: Floats
    cost: Floats
    held: Ints
    extra: Ints
    counts: tuple[Ints, ...]
    starts: tuple[Ints, ...]


def fastest_counts(problem: StackProblem, free: Flow, cutoff_s: float) -> FlowResult | None:
    """Least seconds (`fixed_s` left out, as in `cutoff_s`) under the limit; None where too many flows come near it.

    `free` is the fastest whatever it holds.
    """
    if problem.limit_bytes is None:
        return None
    worst_s = _worst_s(problem) * (1 + ROUNDING)
    levels = sorted(_levels(problem, free, worst_s), key=lambda level: level.bound_s)
    nothing = FlowResult(None, cutoff_s if cutoff_s <= worst_s else np.inf, complete=True)
    more_s = FIRST_BUDGET * worst_s
    while levels and levels[0].bound_s < min(cutoff_s, worst_s):
        budget_s = min(levels[0].bound_s + more_s, cutoff_s, worst_s)
        try:
            seconds, flow = _fastest_of(problem, levels, budget_s)
        except TooMany:
            return None
        if seconds <= budget_s:
            return nothing if seconds >= cutoff_s else FlowResult(flow, seconds, complete=True)
        if budget_s >= min(cutoff_s, worst_s):
            break
        more_s = min(FURTHER_BUDGET * more_s, seconds - levels[0].bound_s)
    return nothing


def _fastest_of(problem: StackProblem, levels: Sequence[Relaxed], budget_s: float) -> tuple[float, Flow | None]:
    """The fastest flow that fits; one of no more than `budget_s` seconds is the fastest of all."""
    best: tuple[float, Flow | None] = np.inf, None
    for level in levels:
        if level.bound_s > min(budget_s, best[0]):
            break
        found = _fastest(problem, level, min(budget_s, best[0]))
        if found is not None and found[0] < best[0]:
            best = found
    return best


def _worst_s(problem: StackProblem) -> float:
    return sum(run.count * float(problem.seconds(r).max()) for r, run in enumerate(problem.runs))


# --- bounds -----------------------------------------------------------------------------------------------------------


def _levels(problem: StackProblem, free: Flow, worst_s: float) -> Iterator[Relaxed]:
    """For each size that the largest temporary may have at the hardest moment, the best price of the bytes there."""
    ledger, limit = problem.ledger, problem.limit_bytes or 0
    k = int(np.argmax(ledger.bytes(free.counts)))
    seconds = [problem.seconds(r) for r in range(len(problem.runs))]
    held, extra = [of[k] for of in ledger.held], [of[k] for of in ledger.extra]
    least = max(int(of.min()) for of in extra)
    low, high = _steps(np.unique(np.maximum(np.concatenate(extra), least)), STEP * limit)
    prices = _prices(problem, seconds, held, worst_s / max(1.0, SMALL * limit))
    costs = [
        np.where(
            of <= high[:, None, None],
            own + prices[:, None] * bytes_,
            np.inf,
        )
        for own, bytes_, of in zip(seconds, held, extra, strict=True)
    ]
    states = problem.states
    matrices = [_matrices(run.choices, cost, states) for run, cost in zip(problem.runs, costs, strict=True)]
    ends = [allowed(s, states) for s in (problem.entry_states, problem.exit_states)]
    totals = cheapest_ways([run.count for run in problem.runs], matrices, *ends).totals
    besides = prices * (int(ledger.base[k]) + low[:, None] - limit)
    bounds = totals + besides
    for number, best in enumerate(bounds.argmax(axis=1).tolist()):
        if np.isfinite(bounds[number, best]):
            yield Relaxed(
                float(bounds[number, best]), float(besides[number, best]), [cost[number, best] for cost in costs]
            )


def _steps(sizes: Ints, apart: float) -> tuple[Ints, Ints]:
    """The least and the largest of sizes, in order, that are taken for one as they are not far apart."""
    first = [0]
    for i, size in enumerate(sizes.tolist()):
        if size > sizes[first[-1]] + apart:
            first.append(i)
    return sizes[first], sizes[[*(i - 1 for i in first[1:]), -1]]


def _prices(problem: StackProblem, seconds: Sequence[Floats], held: Sequence[Ints], highest: float) -> Floats:
    """0, those at which two choices of the same states cost the same, and `highest`."""
    found = [np.array([0.0, highest])]
    for run, own, bytes_ in zip(problem.runs, seconds, held, strict=True):
        alike = (run.choices.entry[:, None] == run.choices.entry) & (run.choices.exit[:, None] == run.choices.exit)
        faster, leaner = np.nonzero(alike & (own[:, None] < own) & (bytes_[:, None] > bytes_))
        found.append((own[leaner] - own[faster]) / (bytes_[faster] - bytes_[leaner]))
    prices = np.unique(np.concatenate(found))
    if len(prices) > MOST_PRICES:
        prices = prices[np.linspace(0, len(prices) - 1, MOST_PRICES).round().astype(int)]
    return prices


def _matrices(choices: Choices, costs: Floats, states: int) -> Floats:
    """(..., S, S): the least of `costs` (..., C) from state to state."""
    found = np.full((*costs.shape[:-1], states, states), np.inf)
    for c, (entry, leave) in enumerate(zip(choices.entry.tolist(), choices.exit.tolist(), strict=True)):
        np.minimum(found[..., entry, leave], costs[..., c], out=found[..., entry, leave])
    return found


# --- listing ----------------------------------------------------------------------------------------------------------


def _fastest(problem: StackProblem, level: Relaxed, budget_s: float) -> tuple[float, Flow] | None:
    """The fastest flow that fits of those of no more than `budget_s` seconds at a level."""
    states, limit = problem.states, problem.limit_bytes or 0
    left_s = (budget_s - level.besides_s) * (1 + ROUNDING)
    each = [_matrices(run.choices, cost, states) for run, cost in zip(problem.runs, level.costs, strict=True)]
    ways = [_power(matrix, run.count) for matrix, run in zip(each, problem.runs, strict=True)]
    behind = [allowed(problem.exit_states, states)]
    for way in reversed(ways):
        behind.insert(0, (way + behind[0][None]).min(axis=1))
    before = allowed(problem.entry_states, states)
    listed: Listed | None = None
    for r in range(len(problem.runs)):
        slack = left_s - before[:, None] - behind[r + 1][None]
        own = _listed(problem, r, level.costs[r], each[r], slack)
        listed = own if listed is None else _joined(listed, own, left_s - behind[r + 1])
        before = (before[:, None] + ways[r]).min(axis=0)
    if listed is None:
        return None
    total = problem.ledger.base + listed.held + listed.extra
    fits = np.flatnonzero((total <= limit).all(axis=1))
    for i in fits[np.argsort(listed.seconds[fits], kind="stable")].tolist():
        flow = Flow(tuple(n[i] for n in listed.counts), tuple(int(s[i]) for s in listed.starts))
        if ties_agree(problem, flow) and not any(
            unreached_states(run.choices, n, s)
            for run, n, s in zip(problem.runs, flow.counts, flow.starts, strict=True)
        ):
            return float(listed.seconds[i]), flow
    return None


def _power(matrix: Floats, count: int) -> Floats:
    """(S, S): least cost of `count` steps from state to state."""
    found = matrix
    for bit in f"{count:b}"[1:]:
        found = (found[:, :, None] + found[None]).min(axis=1)
        found = (found[:, :, None] + matrix[None]).min(axis=1) if bit == "1" else found
    return found


def _listed(problem: StackProblem, r: int, costs: Floats, matrix: Floats, slack: Floats) -> Listed:
    """Ways through run r from any state to any other that cost no more than `slack` (S, S)."""
    run = problem.runs[r]
    choices = run.choices
    if run.count == 1:
        near = np.flatnonzero(costs <= slack[choices.entry, choices.exit])
        counts = np.eye(len(choices), dtype=np.int64)[near]
        return _of_counts(problem, r, costs, counts, choices.entry[near], choices.exit[near])
    each, potential = _potentials(matrix)
    reduced = np.maximum(costs - each + potential[choices.entry] - potential[choices.exit], 0.0)
    room = slack - run.count * each + potential[:, None] - potential[None]
    counts = _multisets(reduced, run.count, float(room.max()))
    spent = counts @ np.where(np.isfinite(reduced), reduced, 0.0)
    unit = np.eye(problem.states, dtype=np.int64)
    entered, left = counts @ unit[choices.entry], counts @ unit[choices.exit]
    turns, enters, leaves = left - entered, entered > 0, left > 0
    wanted = unit[None, :] - unit[:, None]
    moving = counts @ (choices.entry != choices.exit) > 0
    enters &= moving[:, None] | (entered == run.count)  # layers that keep the state are all in one where none moves
    fits = (turns[:, None, None] == wanted).all(axis=3) & enters[:, :, None] & leaves[:, None, :]
    which, first, last = np.nonzero(fits & (spent[:, None, None] <= room))
    return _of_counts(problem, r, costs, counts[which], first, last)


def _potentials(matrix: Floats) -> tuple[float, Floats]:
    """The least mean cost of a cycle of steps, and potentials (S,) under which no step that is taken costs less.

    Raises TooMany where there is no cycle.
    """
    least, power = np.inf, matrix
    for length in range(1, len(matrix) + 1):
        least = min(least, float(np.diagonal(power).min()) / length)
        power = (power[:, :, None] + matrix[None]).min(axis=1)
    if not np.isfinite(least):
        raise TooMany
    potential = np.zeros(len(matrix))
    for _ in range(len(matrix)):
        potential = np.minimum(potential, (potential[:, None] + matrix - least).min(axis=0))
    return least, potential


def _multisets(reduced: Floats, count: int, room: float) -> Ints:
    """(N, C): all ways to take `count` choices whose reduced costs are no more than `room` together."""
    near = np.flatnonzero(reduced <= room)
    near = near[np.argsort(-reduced[near], kind="stable")]
    found = np.zeros((1 if len(near) else 0, len(reduced)), dtype=np.int64)
    left, rest = np.full(len(found), count), np.full(len(found), room)
    for c in near[:-1].tolist():
        most = left if reduced[c] <= 0.0 else np.minimum(left, np.floor(rest / reduced[c] * (1 + ROUNDING)))
        ways = most.astype(np.int64) + 1
        if ways.sum() > MOST_FLOWS:
            raise TooMany
        owner = np.repeat(np.arange(len(found)), ways)
        taken = np.arange(len(owner)) - np.repeat(np.cumsum(ways) - ways, ways)
        found, left, rest = found[owner], left[owner] - taken, rest[owner] - taken * reduced[c]
        found[:, c] = taken
    if len(near):
        found[:, near[-1]] = left
        found = found[left * reduced[near[-1]] <= rest + ROUNDING * abs(room)]
    return found


def _of_counts(problem: StackProblem, r: int, costs: Floats, counts: Ints, first: Ints, last: Ints) -> Listed:
    ledger, used = problem.ledger, counts > 0
    times = counts.astype(np.float64)
    cost: Floats = times @ np.where(np.isfinite(costs), costs, 0.0)
    seconds: Floats = times @ problem.seconds(r)
    extra = np.full((len(counts), len(ledger.base)), NOTHING)
    for c in np.flatnonzero(used.any(axis=0)).tolist():
        np.maximum(extra, np.where(used[:, c, None], ledger.extra[r][:, c], NOTHING), out=extra)
    return Listed(first, last, seconds, cost, counts @ ledger.held[r].T, extra, (counts,), (first,),
    )  # fmt: skip


def _joined(one: Listed, other: Listed, left_s: Floats) -> Listed:
    """Ways through the runs of both, at the end of which in each state no more than `left_s` (S,) has been spent."""
    if len(one.last) * len(other.first) > MOST_FLOWS << 4:
        raise TooMany
    meet: NDArray[np.bool_] = one.last[:, None] == other.first
    meet &= one.cost[:, None] + other.cost <= left_s[other.last]
    i, j = np.nonzero(meet)
    if len(i) > MOST_FLOWS:
        raise TooMany
    return Listed(
        one.first[i], other.last[j], one.seconds[i] + other.seconds[j], one.cost[i] + other.cost[j],
        one.held[i] + other.held[j], np.maximum(one.extra[i], other.extra[j]),
        (*(n[i] for n in one.counts), other.counts[0][j]), (*(s[i] for s in one.starts), other.starts[0][j]),
    )  # fmt: skip
