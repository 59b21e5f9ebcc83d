"""What the stages of a pipeline can be on one mesh with one microbatch: bounds of all, solutions of those asked for.

A stage is a range of units. Its layers are those of the model's runs, so that stages that begin elsewhere but hold as
many equal layers are one problem. All cuts between stages have one layout, the *seam*; parameters that several stages
use are kept alike in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import numpy as np

from autopar.cost.schedule import Holding
from autopar.engine.moments import Backward
from autopar.engine.stack import StackOptions, solve_stack
from autopar.engine.stack_problem import Choices, Floats, Run, StackProblem, StackSolution
from autopar.formulate.chains.columns import Column
from autopar.formulate.chains.dual import PASSES
from autopar.formulate.chains.siblings import FIRST, RUN, WHOLE
from autopar.formulate.chains.strategies import Chains
from autopar.formulate.layers.ladder import ONLY_BYTES
from autopar.formulate.layers.tables import Least
from autopar.formulate.pipelines.paths import LeastPasses
from autopar.formulate.pipelines.piped import Passes
from autopar.formulate.pipelines.stages import Units, batch_bytes
from autopar.graph import Layout
from autopar.plan import data_axes_of

RELATIVE_GAP = 1e-4
"""How near to its bound the solution of a stage is taken as optimal."""
SEAMS_TRIED = 3
DEAREST_SEAM = 1.15
"""Seams are tried if a layer between two of them takes no more than this many times the seconds of the cheapest."""
TIES_TRIED = 3


@dataclass(frozen=True)
class Chunk:
    """Units `first` to `end - 1` as a stage."""

    first: int
    end: int


@dataclass(frozen=True)
class Part:
    """`count` consecutive layers of run `run` under one strategy."""

    run: int
    column: Column
    count: int


@dataclass(frozen=True)
class StagePart:
    """A chunk with a strategy for each layer."""

    chunk: Chunk
    parts: tuple[Part, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of one microbatch forward."""
        return sum(p.column.figures.forward_s * p.count for p in self.parts)

    @property
    def backward_s(self) -> float:
        """Seconds of one microbatch backward."""
        return sum(p.column.figures.backward_s * p.count for p in self.parts)

    @property
    def step_s(self) -> float:
        """Seconds once a step."""
        return sum(p.column.figures.step_s * p.count for p in self.parts)

    @property
    def weight_s(self) -> float:
        """Seconds of a microbatch's backward pass in which gradients of weights are made that can be made apart."""
        return sum(p.column.figures.weight_s * p.count for p in self.parts)

    @property
    def seconds(self) -> Passes:
        """Seconds of its passes."""
        return Passes(self.forward_s, self.backward_s, self.step_s, self.weight_s)


@dataclass(frozen=True)
class GroupPlan:
    """All chunks of one group of devices; `peak_bytes` is the most a device holds, at some time in `backwards`.

    `inputs_bytes` of the batch are on each device besides what the layers count.
    """

    chunks: tuple[StagePart, ...]
    peak_bytes: int
    backwards: tuple[Backward, ...]
    inputs_bytes: int


@dataclass(frozen=True)
class Seam:
    """What all stages agree on: the layout (and its number as a state) at their cuts, how tied parameters are kept."""

    layout: Layout
    state: int
    tie: int


@dataclass(frozen=True, eq=False)
class Ranges:
    """Bounds (n + 1, n + 1) for every range of units as a stage.

    `passes_s`: least seconds of the passes of all (`count`) microbatches; `least`: of each pass alone, up to each unit.
    `priced`: by price per byte and number in flight (this many or more), least seconds of all microbatches and once a
    step, and price of the bytes; `held_bytes`: by number in flight least bytes.
    """

    count: int
    passes_s: Floats
    least: LeastPasses
    priced: dict[float, dict[int, Floats]]
    held_bytes: dict[int, Floats]
    limit_bytes: int

    @property
    def micro_s(self) -> float:
        """Least seconds of the passes of one microbatch through all units."""
        return float(self.passes_s[0, -1]) / self.count

    def load(self, in_flight: int) -> Floats:
        """Least seconds of a step's work of each range with so many in flight, under the byte limit."""
        usable = [
            costs - price * self.limit_bytes
            for price, by_count in self.priced.items()
            for count, costs in by_count.items()
            if not price or count <= in_flight
        ]
        legal: Floats = np.max(usable, axis=0)
        held = self._held(in_flight)
        return np.where(held <= (self.limit_bytes or np.inf), legal, np.inf) if in_flight else legal

    def joint_load(self, chunks: Sequence[Chunk], in_flight: Sequence[int]) -> float:
        """Least seconds of a step's work of several ranges on one group of devices, under the byte limit."""
        pairs = list(zip(chunks, in_flight, strict=True))
        if sum(self._held(most)[c.first, c.end] for c, most in pairs if most) > (self.limit_bytes or np.inf):
            return np.inf
        return max(
            sum(self._cost(c, price, most) for c, most in pairs) - price * self.limit_bytes for price in self.priced
        )

    def _held(self, in_flight: int) -> Floats:
        """Least bytes with so many in flight."""
        return self.held_bytes[max((q for q in self.held_bytes if q <= in_flight), default=min(self.held_bytes))]

    def stretch(self, chunks: Sequence[Chunk], in_flight: Sequence[int]) -> float:
        """How many times as long several ranges on one group work for the byte limit's sake."""
        free = sum(self._cost(c, 0.0, most) for c, most in zip(chunks, in_flight, strict=True))
        return self.joint_load(chunks, in_flight) / free if free else 1.0

    def stretched(self, times: float) -> Ranges:
        """With passes that take so many times as long, each its share of all: what lies between them, too."""
        alone = self.least.forward[-1] + self.least.backward[-1]
        more = self.micro_s / alone if alone else 1.0
        least = LeastPasses(*(times * more * up_to for up_to in self.least))
        return replace(self, passes_s=times * self.passes_s, least=least)

    def _cost(self, chunk: Chunk, price: float, most: int) -> float:
        """Of a range with at most so many in flight.

        The least cost is concave in that number; between none, without bytes, and the fewest that the price is known
        for it is no less than what lies on a line.
        """
        place, by_count = (chunk.first, chunk.end), self.priced[price]
        count = max((q for q in by_count if q <= most), default=min(by_count))
        if most >= count:
            return float(by_count[count][place])
        free = float(next(iter(self.priced[0.0].values()))[place])
        return free + most / count * float(by_count[count][place] - free) if free < np.inf else free


@dataclass(eq=False)
class StageBook:
    """Stages over the mesh of `chains`, whose setting says the microbatch; solutions are remembered."""

    units: Units
    chains: Chains
    _choices: dict[tuple[int, int], tuple[list[int], Choices]] = field(default_factory=dict)
    _solved: dict[object, tuple[StackSolution, float]] = field(default_factory=dict)
    _at_ends: dict[tuple[int, str, Layout], int] = field(default_factory=dict)

    @property
    def least_bytes(self) -> float:
        """No stage that begins the model holds less, once bounded; inf before."""
        level = self.chains.level
        if not level:
            return np.inf
        known = self.ranges if level == WHOLE else self.run_ranges if level == RUN else self.rough_ranges
        return float(np.min(known.held_bytes[self.chains.in_flight[0]][0, 1:]))

    @cached_property
    def rough_ranges(self) -> Ranges:
        """Bounds of all stages from seconds and from bytes each alone, of the longest run alone, at less cost."""
        return self._bounds(FIRST)

    @cached_property
    def run_ranges(self) -> Ranges:
        """Bounds of all stages from the longest run alone."""
        return self._bounds(RUN)

    @cached_property
    def ranges(self) -> Ranges:
        """Bounds of all stages."""
        return self._bounds(WHOLE)

    def _bounds(self, level: int) -> Ranges:
        chains, limit = self.chains, self.chains.budget.limit_bytes or 0
        chains.bound(level)
        prices, steps = chains.step_costs()
        costs = self._range_costs(steps)
        priced: dict[float, dict[int, Floats]] = {}
        for (price, count, _once), cost in zip(prices, costs, strict=True):
            if price != ONLY_BYTES and (price, count, _once) != PASSES:
                priced.setdefault(price, {})[count] = cost
        held = {q: cost for (price, q, _), cost in zip(prices, costs, strict=True) if price == ONLY_BYTES}
        passes = costs[prices.index(PASSES)]
        return Ranges(chains.setting.num_microbatches, passes, self._least(chains.calls), priced, held, limit)

    @cached_property
    def calls_ranges(self) -> Ranges:
        """Bounds of all stages from the calls of layers alone, without changes of layout."""
        chains = self.chains
        both = self._up_to([one.both_s for one in chains.calls])
        size = np.arange(len(both))
        count, here = chains.setting.num_microbatches, size[:, None] < size
        free = np.where(here, both - both[:, None], np.inf) * count
        nothing = np.zeros_like(free)
        return Ranges(count, free, self._least(chains.calls), {0.0: {1: free}}, {1: nothing}, 0)

    def _least(self, each: Sequence[Least]) -> LeastPasses:
        """Of passes up to each unit, from those of the layers of each run."""
        names = ("forward_s", "backward_s", "inputs_s")
        return LeastPasses(*(self._up_to([getattr(own, name) for own in each]) for name in names))

    def _up_to(self, seconds: Sequence[float]) -> Floats:
        """(n + 1,): seconds up to each unit, of layers of each run."""
        counts = [run.count for run in self.chains.runs]
        found: Floats = np.cumsum([0.0, *np.repeat(seconds, counts)])[[*self.units.starts]]
        return found

    def _range_costs(self, steps: Sequence[Floats]) -> Floats:
        """(P, n + 1, n + 1): least cost of each range of units at each of P prices; `steps[r]` (P, S, S) of a layer.

        `reached` (ranges, P, S) are the ranges that begin in front of unit `unit` and end there.
        """
        starts, (prices, states) = self.units.starts, steps[0].shape[:2]
        found = np.full((prices, len(starts), len(starts)), np.inf)
        reached = np.empty((0, prices, states))
        run_of = [r for r, run in enumerate(self.chains.runs) for _ in range(run.count)]
        for unit, count in _stretches(starts, run_of):
            alone = [np.zeros((prices, states))]
            for past in range(1, count + 1):
                for layer in range(starts[unit + past - 1], starts[unit + past]):
                    step = steps[run_of[layer]]
                    reached = (reached[:, :, :, None] + step[None]).min(axis=2)
                    last = alone[-1] if layer == starts[unit + past - 1] else alone.pop()
                    alone.append((last[:, :, None] + step).min(axis=1))
                found[:, :unit, unit + past] = reached.min(axis=2).T
            least = np.stack([a.min(axis=1) for a in alone])
            first, end = np.triu_indices(count + 1, 1)
            found[:, unit + first, unit + end] = least[end - first].T
            reached = np.concatenate([reached, np.stack(alone[:0:-1])])
        return found

    # --- exact ----------------------------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> tuple[tuple[Column, ...], ...]:
        """Strategies of each run, priced."""
        return self.chains.columns()

    @cached_property
    def seams(self) -> list[Seam]:
        """Seams worth trying, those whose layers are cheapest first."""
        columns = self.columns[self._behind_cuts()]
        loops = [c for c in columns if c.strategy.entry == c.strategy.exit]
        cost: dict[Layout, float] = {}
        for c in loops or columns:
            cost[c.strategy.entry] = min(self._seconds(c), cost.get(c.strategy.entry, np.inf))
        near = DEAREST_SEAM * min(cost.values(), default=0.0)
        layouts = sorted((x for x in cost if cost[x] <= near), key=lambda x: (cost[x], x))[:SEAMS_TRIED]
        return [Seam(x, self.chains.states[x], tie) for tie in self._ties() for x in layouts]

    def knows(self, seam: Seam) -> bool:
        """Whether every run has strategies that keep tied parameters as the seam says, and some have its layout."""
        kept = [[c.strategy for c in own if c.tie in (-1, seam.tie)] for own in self.columns]
        return all(kept) and any(seam.layout in (s.entry, s.exit) for own in kept for s in own)

    def _behind_cuts(self) -> int:
        """The run that most stages can begin with."""
        run_of = [r for r, run in enumerate(self.chains.runs) for _ in range(run.count)]
        return Counter(run_of[layer] for layer in self.units.starts[1:-1]).most_common(1)[0][0]

    def _ties(self) -> list[int]:
        """Ways to keep tied parameters worth trying, cheapest over all layers that have them first; -1 where nothing is
        tied."""
        least: list[dict[int, float]] = []
        for columns in self.columns:
            own: dict[int, float] = {}
            for c in columns:
                own[c.tie] = min(self._seconds(c), own.get(c.tie, np.inf))
            if max(own, default=-1) >= 0:
                least.append(own)
        every = [tie for tie in least[0] if all(tie in own for own in least)] if least else []
        cost = {tie: sum(own[tie] for own in least) for tie in every}
        return sorted(cost, key=lambda tie: (cost[tie], tie))[:TIES_TRIED] or [-1]

    def _seconds(self, column: Column) -> float:
        return self.chains.setting.num_microbatches * column.figures.micro_s + column.figures.step_s

    def solve(
        self,
        chunks: Sequence[Chunk],
        holdings: Sequence[Holding],
        seam: Seam,
        limit_bytes: int | None,
        cutoff_s: float = np.inf,
    ) -> GroupPlan | None:
        """The fastest way to run chunks on one group of devices under the limit; None if there is none.

        Nor is there one if it takes `cutoff_s` or more.
        """
        problem = self._problem(chunks, holdings, seam, limit_bytes)
        key = tuple(tuple(self.units.slices(self.chains.runs, c.first, c.end)) for c in chunks)
        ends = (chunks[0].first == 0, chunks[-1].end == len(self.units))
        known = (key, ends, self._told(chunks, seam), problem.backwards, limit_bytes)
        solution, below_s = self._solved.get(known, (None, 0.0))
        if solution is None or (not solution.walks and cutoff_s > below_s):
            solution = solve_stack(problem, StackOptions(RELATIVE_GAP, None, cutoff_s, want_peak=False))
            self._solved[known] = solution, cutoff_s
        return self._plan(chunks, seam, solution, problem) if solution.walks else None

    def _told(self, chunks: Sequence[Chunk], seam: Seam) -> Seam:
        """What of a seam matters to chunks: no tie where none of their layers has what is tied."""
        runs = {index for c in chunks for index, _ in self.units.slices(self.chains.runs, c.first, c.end)}
        return seam if any(c.tie >= 0 for index in runs for c in self.columns[index]) else replace(seam, tie=-1)

    def least_peak(self, chunks: Sequence[Chunk], holdings: Sequence[Holding], seam: Seam) -> float:
        """The smallest peak at which the chunks can be run; inf where states forbid it."""
        solution = solve_stack(self._problem(chunks, holdings, seam, 1))
        return np.inf if solution.peak_bytes is None else solution.peak_bytes

    def _problem(
        self, chunks: Sequence[Chunk], holdings: Sequence[Holding], seam: Seam, limit_bytes: int | None
    ) -> StackProblem:
        runs: list[Run] = []
        for number, chunk in enumerate(chunks):
            runs += [_gate(seam, number)] if runs else []
            for index, count in self.units.slices(self.chains.runs, chunk.first, chunk.end):
                runs.append(Run(count, self._choices_of(index, seam.tie)[1], number))
        states = tuple(range(len(self.chains.states)))
        return StackProblem(
            tuple(runs),
            states if chunks[0].first == 0 else (seam.state,),
            states if chunks[-1].end == len(self.units) else (seam.state,),
            self.chains.setting.num_microbatches,
            fixed_bytes=self.inputs_bytes(chunks, seam),
            limit_bytes=limit_bytes,
            backwards=self.backwards(chunks, holdings, seam),
        )

    def backwards(self, chunks: Sequence[Chunk], holdings: Sequence[Holding], seam: Seam) -> tuple[Backward, ...]:
        """The states of a group's devices as backward passes run, as the stack problem knows them."""
        return tuple(self._backward(chunks, holding, seam) for holding in holdings)

    def _backward(self, chunks: Sequence[Chunk], holding: Holding, seam: Seam) -> Backward:
        """With what is held of what the chunks received and sent for each microbatch in flight.

        What was received waits for gradients of weights with what is put off.
        """
        none = (0,) * len(chunks)
        late, gone = holding.put_off or none, holding.sent or none
        held = 0
        for n, (saved, others, sent_on, chunk) in enumerate(zip(holding.saved, late, gone, chunks, strict=True)):
            waiting = others + (holding.half == 2 and n == holding.chunk)
            received, sent = self._held_bytes(chunk.first, True, seam), self._held_bytes(chunk.end, False, seam)
            held += saved * (received + sent) + (waiting + sent_on) * self.seam_bytes(chunk.first, seam)
        # the gradient that has come for what was sent; and what the schedule still refers to of what it sent last: one
        # more on either side, back only where an earlier microbatch has been
        held += 2 * self.seam_bytes(chunks[holding.chunk].end, seam)
        if not holding.sent and holding.grown[0]:
            held += self.seam_bytes(chunks[0].first, seam)
        return Backward(holding.chunk, holding.saved, holding.grown, held, holding.half, holding.put_off, holding.begun)

    def _choices_of(self, run: int, tie: int) -> tuple[list[int], Choices]:
        """Columns of a run that keep tied parameters as told, and their figures."""
        if (run, tie) not in self._choices:
            rows = [i for i, c in enumerate(self.columns[run]) if c.tie in (-1, tie)]
            self._choices[run, tie] = rows, self.chains.choices([self.columns[run][i] for i in rows])
        return self._choices[run, tie]

    def seam_bytes(self, unit: int, seam: Seam) -> int:
        """Bytes a device sends for one microbatch where unit `unit` begins a stage; none at the model's ends."""
        return self._at_end(unit, "crosses", seam)

    def inputs_bytes(self, chunks: Sequence[Chunk], seam: Seam) -> int:
        """Bytes of the rows of the batch that a device is given; where it has the first stage its layers count them."""
        if chunks[0].first == 0:
            return 0
        setting, graph = self.chains.setting, self.units.graph
        batch_dim = self.chains.runs[self._behind_cuts()].around.entry.batch_dim
        ways = prod(setting.sizes[a] for a in data_axes_of(seam.layout, batch_dim))
        inputs = [graph.values[name] for name in graph.inputs]
        return batch_bytes(inputs, setting.batch * setting.num_microbatches, ways)

    def _held_bytes(self, unit: int, receives: bool, seam: Seam) -> int:
        """Bytes kept for a microbatch of what a chunk received, or sent, but for what counts as saved by its layers."""
        return self._at_end(unit, "received" if receives else "sent", seam)

    def _at_end(self, unit: int, what: str, seam: Seam) -> int:
        if not 0 < unit < len(self.units):
            return 0
        key, setting = (unit, what, seam.layout), self.chains.setting
        if key not in self._at_ends:
            there = (seam.layout, setting.sizes, setting.batch)
            self._at_ends[key] = (
                self.units.crossing_bytes(unit, *there)
                if what == "crosses"
                else self.units.held_bytes(self.chains.runs, unit, what == "received", *there)
            )
        return self._at_ends[key]

    def _plan(self, chunks: Sequence[Chunk], seam: Seam, solution: StackSolution, problem: StackProblem) -> GroupPlan:
        walks = iter(solution.walks)
        found = []
        for position, chunk in enumerate(chunks):
            if position:
                next(walks)  # the gate
            parts = []
            for index, _ in self.units.slices(self.chains.runs, chunk.first, chunk.end):
                rows = self._choices_of(index, seam.tie)[0]
                parts += [Part(index, self.columns[index][rows[c]], n) for c, n in next(walks)]
            found.append(StagePart(chunk, tuple(parts)))
        return GroupPlan(tuple(found), solution.peak_bytes or 0, problem.backwards, problem.fixed_bytes)


def _stretches(starts: Sequence[int], run_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First unit and number of units of stretches of one layer each, all of one run; other units stand alone."""
    kinds = [tuple(run_of[a:b]) for a, b in pairwise(starts)]
    unit = 0
    for kind, alike in groupby(kinds):
        count = len(list(alike))
        yield from ((unit, count),) if len(kind) == 1 else ((unit + i, 1) for i in range(count))
        unit += count


def _gate(seam: Seam, chunk: int) -> Run:
    """A layer that does nothing but be in the seam's state: between two chunks of one group."""
    state, zero = np.array([seam.state]), np.zeros(1, dtype=np.int64)
    nothing = np.zeros(1)
    ties = np.full((1, 1), -1)
    return Run(1, Choices(state, state, nothing, nothing, zero, zero, zero, zero, zero, ties), chunk)
