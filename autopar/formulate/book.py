"""What the stages of a pipeline can be on one mesh with one microbatch: bounds of all, solutions of those asked for.

A stage is a range of units. Its layers are those of the model's runs, so that stages that begin elsewhere but hold as
many equal layers are one problem. All cuts between stages have one layout, the *seam*; parameters that several stages
use are kept alike in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.engine.stack import StackOptions, solve_stack
from autopar.engine.stack_problem import Choices, Floats, Run, StackProblem, StackSolution
from autopar.formulate.chains import ONLY_BYTES, Chains, Column
from autopar.formulate.stages import Units
from autopar.graph import Layout

RELATIVE_GAP = 1e-4
"""How near to its bound the solution of a stage is taken as optimal."""
SEAMS_TRIED = 3
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

    `micro_s`: least seconds of a microbatch. `loads`: by number in flight (this many or more), least seconds of all
    microbatches under the byte limit.
    """

    micro_s: Floats
    loads: dict[int, Floats]

    def load(self, in_flight: int) -> Floats:
        """Least seconds of all microbatches with so many in flight."""
        return self.loads[max(q for q in self.loads if q <= in_flight)]


@dataclass
class StageBook:
    """Stages over the mesh of `chains`, whose setting says the microbatch; solutions are remembered."""

    units: Units
    chains: Chains
    least_bytes: float = np.inf
    _ranges: Ranges | None = None
    _choices: dict[tuple[int, int], tuple[list[int], Choices]] = field(default_factory=dict)
    _solved: dict[object, StackSolution] = field(default_factory=dict)

    @property
    def ranges(self) -> Ranges:
        """Bounds of all stages."""
        if self._ranges is None:
            self.chains.bound_tables()
            self._ranges = self._bounds()
            self.chains.forget()
        return self._ranges

    def _bounds(self) -> Ranges:
        chains, limit = self.chains, self.chains.budget.limit_bytes or 0
        prices = chains.micro_prices
        leanest = (ONLY_BYTES, 1, 1.0)
        tables = [chains.step_costs(price) for price in [*prices, leanest]]
        costs = self._range_costs([np.stack(run) for run in zip(*tables, strict=True)])
        held = costs[-1]
        self.least_bytes = float(np.min(held[0, 1:])) if len(self.units) else np.inf
        fits = np.where(held <= limit, 0.0, np.inf) if limit else np.where(np.isfinite(held), 0.0, np.inf)
        whole = dict(zip(prices, costs, strict=False))
        loads = {}
        for count in chains.in_flight:
            usable = [whole[p] - p[0] * limit for p in prices if p[1] <= count]
            loads[count] = np.max(usable, axis=0) + fits
        free = whole[min(prices)]
        return Ranges(free / chains.setting.num_microbatches + fits, loads)

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
        self.chains.bound_tables()
        found = self.chains.columns()
        self.chains.forget()
        return found

    @cached_property
    def seams(self) -> list[Seam]:
        """Seams worth trying, those whose layers are cheapest first."""
        m = self.chains.setting.num_microbatches
        cost: dict[Layout, float] = {}
        ties: dict[int, float] = {}
        for columns in self.columns:
            for c in columns:
                seconds = m * c.figures.micro_s + c.figures.step_s
                if c.strategy.entry == c.strategy.exit:
                    cost[c.strategy.entry] = min(seconds, cost.get(c.strategy.entry, np.inf))
                if c.tie >= 0:
                    ties[c.tie] = min(seconds, ties.get(c.tie, np.inf))
        for columns in [] if cost else self.columns[1:]:
            for c in columns:
                cost.setdefault(c.strategy.entry, 0.0)
        layouts = sorted(cost, key=lambda x: (cost[x], x))[:SEAMS_TRIED]
        kept = sorted(ties, key=lambda t: (ties[t], t))[:TIES_TRIED] or [-1]
        return [Seam(x, self.chains.states[x], tie) for tie in kept for x in layouts]

    def solve(self, chunks: Sequence[Chunk], seam: Seam, limit_bytes: int | None) -> GroupPlan | None:
        """The fastest way to run chunks on one group of devices under the limit; None if there is none."""
        problem = self._problem(chunks, seam, limit_bytes)
        key = tuple((tuple(self.units.slices(self.chains.runs, c.first, c.end)), c.in_flight) for c in chunks)
        ends = (chunks[0].first == 0, chunks[-1].end == len(self.units))
        known = (key, ends, seam, problem.fixed_bytes, limit_bytes)
        if known not in self._solved:
            self._solved[known] = solve_stack(problem, StackOptions(RELATIVE_GAP, want_peak=False))
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
