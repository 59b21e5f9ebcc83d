"""What the stages of a pipeline can be on one mesh with one microbatch: bounds of all, solutions of those asked for.

A stage is a range of units. Its layers are those of the model's runs, so that stages that begin elsewhere but hold as
many equal layers are one problem. All cuts between stages have one layout, the *seam*; parameters that several stages
use are kept alike in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.engine.stack import StackOptions, solve_stack
from autopar.engine.stack_problem import Choices, Floats, Run, StackProblem, StackSolution
from autopar.formulate.chains import Chains
from autopar.formulate.columns import Column
from autopar.formulate.ladder import ONLY_BYTES
from autopar.formulate.stages import Units
from autopar.graph import Layout

RELATIVE_GAP = 1e-4
"""How near to its bound the solution of a stage is taken as optimal."""
SEAMS_TRIED = 3
DEAREST_SEAM = 1.15
"""Seams are tried if a layer between two of them takes no more than this many times the seconds of the cheapest."""
TIES_TRIED = 3


@dataclass(frozen=True)
class Chunk:
    """Units `first` to `end - 1` as a stage, with `in_flight` microbatches under way."""

    first: int
    end: int
    in_flight: int


@dataclass(frozen=True)
class Part:
    """`count` consecutive layers of run `run` under one strategy."""

    run: int
    column: Column
    count: int


@dataclass(frozen=True)
class StagePart:
    """A chunk with a strategy for each layer; `seam_bytes`: held of what it received and sent, for all in flight."""

    chunk: Chunk
    parts: tuple[Part, ...]
    seam_bytes: int

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


@dataclass(frozen=True)
class GroupPlan:
    """All chunks of one group of devices; `peak_bytes` is the most a device holds."""

    chunks: tuple[StagePart, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Seam:
    """What all stages agree on: the layout (and its number as a state) at their cuts, how tied parameters are kept."""

    layout: Layout
    state: int
    tie: int


@dataclass(frozen=True, eq=False)
class Ranges:
    """Bounds (n + 1, n + 1) for every range of units as a stage.

    `micro_s`: least seconds of a microbatch. `priced`: by price per byte and number in flight (this many or more),
    least seconds of all microbatches and price of the bytes; `held_bytes`: least bytes with one in flight.
    """

    micro_s: Floats
    priced: dict[float, dict[int, Floats]]
    held_bytes: Floats
    limit_bytes: int

    def load(self, in_flight: int) -> Floats:
        """Least seconds of all microbatches of each range with so many in flight, under the byte limit."""
        usable = [
            costs - price * self.limit_bytes
            for price, by_count in self.priced.items()
            for count, costs in by_count.items()
            if count <= in_flight
        ]
        legal: Floats = np.max(usable, axis=0)
        return np.where(self.held_bytes <= (self.limit_bytes or np.inf), legal, np.inf)

    def joint_load(self, chunks: Sequence[Chunk]) -> float:
        """Least seconds of all microbatches through several ranges on one group of devices, under the byte limit."""
        if sum(self.held_bytes[c.first, c.end] for c in chunks) > (self.limit_bytes or np.inf):
            return np.inf
        return max(
            sum(float(by_count[max(q for q in by_count if q <= c.in_flight)][c.first, c.end]) for c in chunks)
            - price * self.limit_bytes
            for price, by_count in self.priced.items()
        )


@dataclass
class StageBook:
    """Stages over the mesh of `chains`, whose setting says the microbatch; solutions are remembered."""

    units: Units
    chains: Chains
    least_bytes: float = np.inf
    _choices: dict[tuple[int, int], tuple[list[int], Choices]] = field(default_factory=dict)
    _solved: dict[object, StackSolution] = field(default_factory=dict)

    @cached_property
    def rough_ranges(self) -> Ranges:
        """Bounds of all stages from the longest run of layers alone, at less cost."""
        self.chains.rough_tables()
        return self._bounds()

    @cached_property
    def ranges(self) -> Ranges:
        """Bounds of all stages."""
        self.chains.bound_tables()
        return self._bounds()

    def _bounds(self) -> Ranges:
        """Bounds by the tables there are."""
        chains, limit = self.chains, self.chains.budget.limit_bytes or 0
        prices = chains.micro_prices
        costs = self._range_costs(chains.step_costs([*prices, (ONLY_BYTES, 1, 1.0)]))
        chains.forget()
        self.least_bytes = float(np.min(costs[-1][0, 1:]))
        priced: dict[float, dict[int, Floats]] = {}
        for (price, count, _), cost in zip(prices, costs, strict=False):
            priced.setdefault(price, {})[count] = cost
        free = priced[0.0][chains.in_flight[0]]
        return Ranges(free / chains.setting.num_microbatches, priced, costs[-1], limit)

    def _range_costs(self, steps: Sequence[Floats]) -> Floats:
        """(P, n + 1, n + 1): least cost of each range of units at each of P prices; `steps[r]` (P, S, S) of a layer."""
        units, (prices, states) = len(self.units), steps[0].shape[:2]
        found = np.full((prices, units + 1, units + 1), np.inf)
        reached = np.full((units, prices, states), np.inf)
        run_of = [r for r, run in enumerate(self.chains.runs) for _ in range(run.count)]
        for unit, (low, high) in enumerate(pairwise(self.units.starts)):
            reached[unit] = 0.0
            for layer in range(low, high):
                open_ = reached[: unit + 1]
                reached[: unit + 1] = (open_[:, :, :, None] + steps[run_of[layer]][None]).min(axis=2)
            found[:, : unit + 1, unit + 1] = reached[: unit + 1].min(axis=2).T
        return found

    # --- exact ----------------------------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> tuple[tuple[Column, ...], ...]:
        """Strategies of each run, priced."""
        self.chains.refined_tables()
        found = self.chains.columns()
        self.chains.forget()
        return found

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

    def _behind_cuts(self) -> int:
        """The run that most stages can begin with."""
        run_of = [r for r, run in enumerate(self.chains.runs) for _ in range(run.count)]
        return Counter(run_of[layer] for layer in self.units.starts[1:-1]).most_common(1)[0][0]

    def _ties(self) -> list[int]:
        """Ways to keep tied parameters worth trying, cheapest first; -1 where nothing is tied."""
        ties: dict[int, float] = {}
        for columns in self.columns:
            for c in columns:
                if c.tie >= 0:
                    ties[c.tie] = min(self._seconds(c), ties.get(c.tie, np.inf))
        return sorted(ties, key=lambda t: (ties[t], t))[:TIES_TRIED] or [-1]

    def _seconds(self, column: Column) -> float:
        return self.chains.setting.num_microbatches * column.figures.micro_s + column.figures.step_s

    def solve(
        self, chunks: Sequence[Chunk], seam: Seam, limit_bytes: int | None, cutoff_s: float = np.inf
    ) -> GroupPlan | None:
        """The fastest way to run chunks on one group of devices under the limit; None if there is none.

        Nor is there one if it takes `cutoff_s` or more: cutoffs must not rise from one call to the next.
        """
        problem = self._problem(chunks, seam, limit_bytes)
        key = tuple((tuple(self.units.slices(self.chains.runs, c.first, c.end)), c.in_flight) for c in chunks)
        ends = (chunks[0].first == 0, chunks[-1].end == len(self.units))
        known = (key, ends, seam, problem.fixed_bytes, limit_bytes)
        if known not in self._solved:
            self._solved[known] = solve_stack(problem, StackOptions(RELATIVE_GAP, None, cutoff_s, want_peak=False))
        solution = self._solved[known]
        return self._plan(chunks, seam, solution) if solution.walks else None

    def least_peak(self, chunks: Sequence[Chunk], seam: Seam) -> float:
        """The smallest peak at which the chunks can be run; inf where states forbid it."""
        solution = solve_stack(self._problem(chunks, seam, 1))
        return np.inf if solution.peak_bytes is None else solution.peak_bytes

    def _problem(self, chunks: Sequence[Chunk], seam: Seam, limit_bytes: int | None) -> StackProblem:
        runs: list[Run] = []
        for chunk in chunks:
            runs += [_gate(seam)] if runs else []
            for index, count in self.units.slices(self.chains.runs, chunk.first, chunk.end):
                runs.append(Run(count, self._choices_of(index, seam.tie)[1], chunk.in_flight))
        states = tuple(range(len(self.chains.states)))
        return StackProblem(
            tuple(runs),
            states if chunks[0].first == 0 else (seam.state,),
            states if chunks[-1].end == len(self.units) else (seam.state,),
            self.chains.setting.num_microbatches,
            fixed_bytes=sum(self._seam_bytes(chunk, seam) for chunk in chunks),
            limit_bytes=limit_bytes,
        )

    def _choices_of(self, run: int, tie: int) -> tuple[list[int], Choices]:
        """Columns of a run that keep tied parameters as told, and their figures."""
        if (run, tie) not in self._choices:
            rows = [i for i, c in enumerate(self.columns[run]) if c.tie in (-1, tie)]
            self._choices[run, tie] = rows, self.chains.choices([self.columns[run][i] for i in rows])
        return self._choices[run, tie]

    def seam_bytes(self, unit: int, seam: Seam) -> int:
        """Bytes a device sends for one microbatch where unit `unit` begins a stage."""
        setting = self.chains.setting
        return self.units.crossing_bytes(unit, seam.layout, setting.sizes, setting.batch)

    def _seam_bytes(self, chunk: Chunk, seam: Seam) -> int:
        received = self.seam_bytes(chunk.first, seam) if chunk.first else 0
        sent = self.seam_bytes(chunk.end, seam) if chunk.end < len(self.units) else 0
        return chunk.in_flight * (received + sent)

    def _plan(self, chunks: Sequence[Chunk], seam: Seam, solution: StackSolution) -> GroupPlan:
        walks = iter(solution.walks)
        found = []
        for position, chunk in enumerate(chunks):
            if position:
                next(walks)  # the gate
            parts = []
            for index, _ in self.units.slices(self.chains.runs, chunk.first, chunk.end):
                rows = self._choices_of(index, seam.tie)[0]
                parts += [Part(index, self.columns[index][rows[c]], n) for c, n in next(walks)]
            found.append(StagePart(chunk, tuple(parts), self._seam_bytes(chunk, seam)))
        return GroupPlan(tuple(found), solution.peak_bytes or 0)


def _gate(seam: Seam) -> Run:
    """A layer that does nothing but be in the seam's state: between two chunks of one group."""
    state, zero = np.array([seam.state]), np.zeros(1, dtype=np.int64)
    nothing = np.zeros(1)
    ties = np.full((1, 1), -1)
    return Run(1, Choices(state, state, nothing, nothing, zero, zero, zero, zero, zero, ties))
