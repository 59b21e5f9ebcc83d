"""The strategies worth having for every layer over a mesh: tables of all of them, and the cheapest chains' priced.

Every layer class is solved by elimination for all pairs of states at its cuts, in every mode (ZeRO level and axes,
recomputation) and for a ladder of prices per byte. The cheapest chain at a price is a Lagrangian lower bound on every
plan under the byte limit. The strategies on the cheapest chains (for each price, of all modes together and of each
mode alone) are lowered and priced exactly: they are the columns that scenarios choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost.layer import LayerFigures
from autopar.cost.pricer import Pricer
from autopar.engine.eliminate import Elimination, eliminate
from autopar.engine.label_graph import Costs
from autopar.engine.stack_path import cheapest_path
from autopar.engine.stack_problem import Choices, Floats, Run, StackProblem
from autopar.formulate.figures import layer_figures
from autopar.formulate.labels import LabelSpace, label_space
from autopar.formulate.rates import ParameterRates
from autopar.formulate.runs import LayerRun, Surroundings
from autopar.formulate.tables import (
    Mode,
    Price,
    RelayoutPrices,
    Setting,
    SpaceCosts,
    label_graph,
    passing_seconds,
    space_costs,
)
from autopar.graph import Layout
from autopar.plan import DtypePolicy, LayerStrategy, data_axes_of

PRICE_LADDER = (0.02, 0.1, 0.4, 1.5, 6.0)
"""Prices of all the memory there is, as multiples of the time of computation alone."""
FINE_PRICES = 5
"""Prices tried between the neighbours of the best of the ladder."""
ONLY_BYTES, NO_TIME = 1.0, 1e-15
"""Price of a byte and weight of a second at which the cheapest chain is the one that holds least."""
STORAGES_TRIED = 3
"""How many storage layouts of a tied parameter are followed up at each price."""


@dataclass(frozen=True)
class Budget:
    """What holds for every scenario: byte limit (None: none) and bytes held besides the layers, dtypes, optimizer."""

    limit_bytes: int | None
    policy: DtypePolicy
    optimizer: str


@dataclass(frozen=True)
class Column:
    """A priced strategy of one run; `tie` numbers the storage of tied parameters and their ZeRO level, -1 for none."""

    strategy: LayerStrategy
    figures: LayerFigures
    tie: int


_Choice: TypeAlias = tuple[tuple[int, ...], int, bool]
"""Labels of a layer's variables, ZeRO level, recomputation."""


@dataclass(frozen=True)
class _Arc:
    """A use of one run's table: mode index, states and the label of the tied storage (-1: none)."""

    mode: int
    entry: int
    exit: int
    storage: int


@dataclass
class _RunTables:
    """Elimination of one run: `table` (modes, entry, exit[, storage])."""

    around: Surroundings
    space: LabelSpace
    modes: list[Mode]
    solved: Elimination
    states: tuple[tuple[int, ...], tuple[int, ...]]

    def costs(self, modes: list[int], storage: int) -> Costs:
        """Costs (modes, entry, exit) with tied parameters stored as `storage` says."""
        table = self.solved.table[modes]
        return table[..., storage] if self.space.tied else table


Spaces: TypeAlias = dict[tuple[Surroundings, tuple[int, ...], int], LabelSpace]
"""Choices of layers by surroundings, mesh and what the batch has in common with the number of devices."""


@dataclass
class Chains:
    """Tables and columns of a model's layers over a mesh.

    `shares`: devices' worth of memory that all layers together have (stages of a pipeline). `in_flight`: numbers of
    microbatches under way that are reckoned with. `spaces`: choices laid out before, by whoever shares the dict.
    """

    runs: tuple[LayerRun, ...]
    setting: Setting
    pricer: Pricer
    budget: Budget
    relayouts: RelayoutPrices
    shares: int = 1
    in_flight: tuple[int, ...] = (1,)
    spaces: Spaces = field(default_factory=dict)
    states: dict[Layout, int] = field(default_factory=dict)
    _tables: list[_RunTables] = field(default_factory=list)

    @property
    def possible(self) -> bool:
        """Whether pins and batch leave every layer layouts for its values at both ends and a way to be kept."""
        ends = [(run.around, *run.around.states(self.setting.sizes, self.setting.batch)) for run in self.runs]
        return all(
            behind
            and any(not zero or data_axes_of(x, around.entry.batch_dim) for x in before for zero in around.pins.zero)
            for around, before, behind in ends
        )

    def bound_tables(self) -> None:
        """Make the tables at a coarse ladder of prices."""
        costs = self._all_costs()
        self._tables = self._eliminated(costs, self._bounding(self._ladder(costs)))

    def longest_run_s(self) -> float:
        """Least seconds of the longest run alone, whatever it holds: a bound that costs one class's table."""
        run = max(self.runs, key=lambda r: r.count)
        space = self._space(run, replace(run.around, passing=()))
        costs = space_costs(space, run.around, self.setting, self.pricer, self.relayouts)
        modes = list(self._modes(run.around, space, self._bounding([0.0])))
        ends = [space.variables[v].layouts for v in (space.entry, space.exit)]
        nothing = np.zeros((len(ends[0]), len(ends[1])))
        table = eliminate(label_graph(costs, nothing, run.around, self.setting, modes, self._rates())).table.min(axis=0)
        least = table.min(axis=2) if space.tied else table
        ways = np.argwhere(np.isfinite(least))
        before, behind = self._number(space)
        choices = _bare([before[e] for e, _ in ways], [behind[x] for _, x in ways])
        weights = [least[e, x] for e, x in ways]
        path = cheapest_path(free_problem((Run(run.count, choices),), 1), [np.array(weights)]) if weights else None
        return np.inf if path is None else float(np.array(weights) @ path.counts[0])

    def refined_tables(self) -> None:
        """Tables for columns: at a coarse ladder of prices, then at a fine one around the price of the best bound.

        The columns of stages serve any number in flight: every other price of the ladder, with the most in flight.
        """
        costs = self._all_costs()
        coarse = self._ladder(costs)
        if self.setting.staged:
            self._tables = self._eliminated(costs, [(price, self.in_flight[-1], 1.0) for price in coarse[::2]])
            return
        self._tables = self._eliminated(costs, self._bounding(coarse))
        if len(coarse) > 1:
            best = max(range(len(coarse)), key=lambda i: self.bound_at((coarse[i], self.in_flight[0], 1.0)))
            self._tables = self._eliminated(costs, self._bounding(self._refined(coarse, best)))

    def forget(self) -> None:
        """Drop the tables: there may be hundreds."""
        self._tables = []

    @property
    def prices(self) -> list[Price]:
        """Prices of the tables under which a second counts as a second."""
        return sorted(p for p in self._known_prices() if p[2] and p[0] != ONLY_BYTES)

    @property
    def micro_prices(self) -> list[Price]:
        """Prices of the tables under which only seconds in microbatches count."""
        return sorted(p for p in self._known_prices() if not p[2])

    def _known_prices(self) -> set[Price]:
        return {mode.price for tables in self._tables for mode in tables.modes}

    def columns(self, leanest: bool = False) -> tuple[tuple[Column, ...], ...]:
        """The strategies on the cheapest chains of each run, priced exactly; `leanest`: only those that hold least.

        The leanest don't depend on the limit and are always among all.
        """
        found: list[dict[_Choice, Column]] = [{} for _ in self.runs]
        seen: set[tuple[int, _Arc]] = set()
        for arcs in self._promising([self._only_bytes] if leanest else [*self.prices, self._only_bytes]):
            for r, arc in arcs:
                if (r, arc) not in seen:
                    seen.add((r, arc))
                    choice = self._choice(r, arc)
                    if choice not in found[r]:
                        found[r][choice] = self._column(r, arc, choice)
        return tuple(tuple(c.values()) for c in found)

    def bound_at(self, price: Price) -> float:
        """Seconds that no plan under the limit can beat, by the prices of bytes."""
        return self.cheapest(price) - price[0] * (self.budget.limit_bytes or 0)

    @property
    def least_bytes(self) -> float:
        """Bytes that every plan holds at least (temporaries apart)."""
        return self.cheapest(self._only_bytes)

    def cheapest(self, price: Price) -> float:
        """Cost of the cheapest chain."""
        return min((cost for cost, _ in self._chains(price, None)), default=np.inf)

    def step_costs(self, price: Price) -> list[Floats]:
        """For each run the least cost (S, S) of one layer between numbered states, whatever the tied storage."""
        size = len(self.states)
        found = []
        for tables in self._tables:
            modes = [k for k, mode in enumerate(tables.modes) if mode.price == price]
            table = tables.solved.table[modes].min(axis=0)
            least = table.min(axis=2) if tables.space.tied else table
            costs = np.full((size, size), np.inf)
            costs[np.ix_(*tables.states)] = least
            found.append(costs)
        return found

    # --- tables ---------------------------------------------------------------------------------------------------

    def _rates(self) -> ParameterRates:
        return ParameterRates(
            self.pricer, self.setting.mesh, self.budget.policy, self.budget.optimizer,
            self.setting.num_microbatches, self._trained_elements(), self.setting.staged,
        )  # fmt: skip

    def _eliminated(self, costs: Mapping[Surroundings, SpaceCosts], prices: list[Price]) -> list[_RunTables]:
        rates = self._rates()
        tables = {}
        for around, cost in costs.items():
            modes = list(self._modes(around, cost.space, [*prices, self._only_bytes]))
            passing = passing_seconds(cost.space, around, self.setting, self.relayouts)
            solved = eliminate(label_graph(cost, passing, around, self.setting, modes, rates))
            tables[around] = _RunTables(around, cost.space, modes, solved, self._number(cost.space))
        return [tables[run.around] for run in self.runs]

    def _ladder(self, costs: Mapping[Surroundings, SpaceCosts]) -> list[float]:
        """0, and prices at which all memory together costs some multiple of the computation."""
        if self.budget.limit_bytes is None:
            return [0.0]
        floor_s = sum(
            run.count * sum(float(np.min(f + b)) for f, b in zip(c.forward, c.backward, strict=True))
            for run in self.runs
            for c in [costs[run.around]]
        )
        whole = self.setting.num_microbatches * floor_s / (self.budget.limit_bytes * self.shares)
        return [0.0, *(x * whole for x in PRICE_LADDER)]

    def _refined(self, coarse: list[float], best: int) -> list[float]:
        """0, and prices between the neighbours of the best one."""
        low = coarse[max(best - 1, 1)] if best != 1 else coarse[1] * coarse[1] / coarse[2]
        high = coarse[min(best + 1, len(coarse) - 1)] if best else coarse[1]
        if best == 0:
            return [0.0, coarse[1] / 4, coarse[1]]
        return [0.0, *np.geomspace(low, high, FINE_PRICES).tolist()]

    def _all_costs(self) -> dict[Surroundings, SpaceCosts]:
        """Costs in all surroundings; those that differ only in what passes by share them."""
        alike: dict[Surroundings, SpaceCosts] = {}
        found = {}
        for run in self.runs:
            key = replace(run.around, passing=())
            if key not in alike:
                space = self._space(run, key)
                alike[key] = space_costs(space, run.around, self.setting, self.pricer, self.relayouts)
            found[run.around] = alike[key]
        return found

    def _space(self, run: LayerRun, key: Surroundings) -> LabelSpace:
        """Which choices there are depends on what the batch has in common with the devices alone."""
        sizes = self.setting.sizes
        common = gcd(self.setting.batch, prod(sizes))
        if (key, sizes, common) not in self.spaces:
            self.spaces[key, sizes, common] = label_space(run.layer, run.around, sizes, self.setting.batch)
        return self.spaces[key, sizes, common]

    def _trained_elements(self) -> int:
        """Elements of all parameters, a power of two."""
        total = sum(
            run.count * prod(run.layer.values[name].shape_at(1))
            for run in self.runs
            for name, owned in zip(run.layer.params, run.around.owned, strict=True)
            if owned
        )
        return 1 << max(10, total.bit_length())

    def _number(self, space: LabelSpace) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the layouts in front and behind."""
        ends = (space.variables[space.entry].layouts, space.variables[space.exit].layouts)
        before, behind = (tuple(self.states.setdefault(x, len(self.states)) for x in e) for e in ends)
        return before, behind

    def _modes(self, around: Surroundings, space: LabelSpace, prices: list[Price]) -> Iterator[Mode]:
        batch_dim = around.entry.batch_dim
        found = {data_axes_of(state, batch_dim) for state in space.variables[space.entry].layouts}
        for price, count, once in prices:
            for recompute in around.pins.recompute:
                for zero in around.pins.zero:
                    for axes in sorted(found - {()}) if zero else [()]:
                        weight = NO_TIME if price == ONLY_BYTES else 1.0
                        yield Mode(zero, axes, recompute == "full", price, weight, count, once)

    def _bounding(self, ladder: list[float]) -> list[Price]:
        """One number in flight will do where bytes cost nothing; stages are bounded by seconds a microbatch alone."""
        counts = {price: self.in_flight if price else self.in_flight[:1] for price in ladder}
        return [(price, count, 0.0 if self.setting.staged else 1.0) for price in ladder for count in counts[price]]

    @property
    def _only_bytes(self) -> Price:
        return ONLY_BYTES, self.in_flight[0], 1.0

    # --- chains ---------------------------------------------------------------------------------------------------

    def _chains(self, price: Price, family: tuple[int, bool] | None) -> list[tuple[float, list[tuple[int, _Arc]]]]:
        """Cheapest chain at a price for each way to store what is tied, best first; `family` = (zero, recompute)."""
        found = []
        for storage, zero in self._storages():
            chain = self._chain(price, family, storage, zero)
            if chain is not None:
                found.append(chain)
        return sorted(found, key=lambda c: c[0])

    def _storages(self) -> list[tuple[int, int]]:
        """Labels of the tied storage, with each ZeRO level its layers may have; (-1, -1) when nothing is tied."""
        tied = [t for t in self._tables if t.space.tied]
        if not tied:
            return [(-1, -1)]
        count = len(tied[0].space.variables[tied[0].space.tied[0]])
        return [(s, z) for s in range(count) for z in tied[0].around.pins.zero]

    def _chain(
        self, price: Price, family: tuple[int, bool] | None, storage: int, tied_zero: int
    ) -> tuple[float, list[tuple[int, _Arc]]] | None:
        weights, arcs, runs = [], [], []
        for run, tables in zip(self.runs, self._tables, strict=True):
            modes = [k for k, mode in enumerate(tables.modes) if _fits(mode, price, family, tables, tied_zero)]
            if not modes:
                return None
            costs = tables.costs(modes, storage)
            best, least = costs.argmin(axis=0), costs.min(axis=0)
            ways = [(e, x) for e, x in np.argwhere(np.isfinite(least))]
            weights.append(np.array([least[e, x] for e, x in ways]))
            arcs.append([_Arc(modes[best[e, x]], e, x, storage if tables.space.tied else -1) for e, x in ways])
            before, behind = tables.states
            runs.append(Run(run.count, _bare([before[e] for e, _ in ways], [behind[x] for _, x in ways])))
        problem = free_problem(tuple(runs), self.setting.num_microbatches)
        path = cheapest_path(problem, weights) if all(len(w) for w in weights) else None
        if path is None:
            return None
        cost = sum(float(w @ n) for w, n in zip(weights, path.counts, strict=True))
        return cost, [(r, arcs[r][i]) for r, n in enumerate(path.counts) for i in np.flatnonzero(n)]

    def _promising(self, prices: list[Price]) -> Iterator[list[tuple[int, _Arc]]]:
        """Arcs of the cheapest chains at the prices, over all modes and for each family of modes alone."""
        families = {(m.zero, m.recompute) for t in self._tables for m in t.modes}
        for price in prices:
            for family in [None, *sorted(families)]:
                for _, arcs in self._chains(price, family)[:STORAGES_TRIED]:
                    yield arcs

    # --- exact ----------------------------------------------------------------------------------------------------

    def _choice(self, r: int, arc: _Arc) -> _Choice:
        """What the arc stands for: many prices come to the same."""
        tables = self._tables[r]
        mode = tables.modes[arc.mode]
        kept = (arc.entry, arc.exit, arc.storage)[: 2 + len(tables.space.tied)]
        return tables.solved.decode(arc.mode, kept), mode.zero, mode.recompute

    def _column(self, r: int, arc: _Arc, choice: _Choice) -> Column:
        tables, mode = self._tables[r], self._tables[r].modes[arc.mode]
        strategy = tables.space.strategy(dict(enumerate(choice[0])), mode.zero, "full" if mode.recompute else "none")
        figures = layer_figures(
            self.runs[r], strategy, self.setting, self.pricer, self.budget.policy, self.budget.optimizer
        )
        return Column(strategy, figures, arc.storage * 4 + mode.zero if arc.storage >= 0 else -1)

    def choices(self, columns: Sequence[Column]) -> Choices:
        """Columns of one run as choices of the stack problem."""
        figures = [c.figures for c in columns]
        memory = [f.memory for f in figures]
        return Choices(
            entry=_ints(self.states[c.strategy.entry] for c in columns),
            exit=_ints(self.states[c.strategy.exit] for c in columns),
            micro_s=np.array([f.micro_s for f in figures]),
            step_s=np.array([f.step_s for f in figures]),
            static_bytes=_ints(m.parameters + m.optimizer for m in memory),
            grad_bytes=_ints(m.gradients for m in memory),
            saved_bytes=_ints(m.saved for m in memory),
            transient_bytes=_ints(m.transient for m in memory),
            step_bytes=_ints(m.step for m in memory),
            ties=_ints(c.tie for c in columns)[:, None],
            update_bytes=_ints(m.update for m in memory),
        )


def free_problem(runs: tuple[Run, ...], num_microbatches: int, limit_bytes: int | None = None) -> StackProblem:
    """The stack problem of runs whose ends may be in any state that their choices know."""
    entries, exits = np.unique(runs[0].choices.entry), np.unique(runs[-1].choices.exit)
    return StackProblem(runs, tuple(entries.tolist()), tuple(exits.tolist()), num_microbatches, limit_bytes=limit_bytes)


def _fits(mode: Mode, price: Price, family: tuple[int, bool] | None, tables: _RunTables, tied_zero: int) -> bool:
    """Whether a mode belongs to a price, a family and the ZeRO level of tied parameters."""
    if mode.price != price or (tables.space.tied and mode.zero != tied_zero):
        return False
    if family is None:
        return True
    pins = tables.around.pins
    allowed = family[0] in pins.zero and ("full" if family[1] else "none") in pins.recompute
    return (
        not allowed
        or (mode.zero, mode.recompute) == family
        or (bool(tables.space.tied) and mode.recompute == family[1])
    )


def _ints(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def _bare(entry: list[int], exit_: list[int]) -> Choices:
    """Choices of which only the states matter."""
    n = len(entry)
    zero, nothing = np.zeros(n, dtype=np.int64), np.zeros(n)
    return Choices(
        np.array(entry, dtype=np.int64), np.array(exit_, dtype=np.int64), nothing, nothing, zero, zero, zero, zero, zero
    )
