"""The strategies worth having for every layer over a mesh: tables of all of them, and the cheapest chains' priced.

Every layer class is solved by elimination for all pairs of states at its cuts, in every mode (ZeRO level and axes,
recomputation) and for a ladder of prices per byte. The cheapest chain at a price is a Lagrangian lower bound on every
plan under the byte limit. The strategies on the cheapest chains (for each price, of all modes together and of each
mode alone) are lowered and priced exactly: they are the columns that scenarios choose from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from autopar.cost.layer import LayerFigures
from autopar.cost.pricer import Pricer
from autopar.engine.eliminate import eliminate
from autopar.engine.stack_problem import Choices, Floats
from autopar.formulate.call_prices import CallPrices
from autopar.formulate.columns import Budget, Column, choices_of
from autopar.formulate.figures import LoweredLayer, layer_figures, lowered
from autopar.formulate.labels import LabelSpace, label_space
from autopar.formulate.ladder import ONLY_BYTES, coarse_ladder, fine_ladder, modes_of
from autopar.formulate.pins import Pins
from autopar.formulate.rates import ParameterRates
from autopar.formulate.relayout_prices import RelayoutPrices
from autopar.formulate.run_tables import Arc, CheapestChains, Family, RunTables
from autopar.formulate.runs import LayerRun, Surroundings, layer_runs
from autopar.formulate.storing import storage_costs, undominated
from autopar.formulate.tables import (
    Price,
    Setting,
    SpaceCosts,
    label_graph,
    passing_seconds,
    space_costs,
)
from autopar.graph import Layout, OpGraph
from autopar.plan import LayerStrategy, data_axes_of

STORAGES_TRIED = 3
"""How many storage layouts of a tied parameter are followed up at each price."""

EXACT_ENTRIES = 1 << 22
"""Largest table of an elimination that is exact; wider layers are solved by a bound and what it leads to."""
RELAXED_ENTRIES = 1 << 19
"""Largest table where it is not exact."""

_Choice: TypeAlias = tuple[tuple[int, ...], int, str]
"""Labels of a layer's variables, ZeRO level, recomputation."""


class Known:
    """What the scenarios of a search over one model share: runs, calls priced before, choices laid out before.

    `spaces`: by surroundings, mesh and, where samples can't be dealt evenly over all devices, the batch.
    """

    def __init__(self, pricer: Pricer) -> None:
        self.calls = CallPrices(pricer)
        self.spaces: dict[tuple[Surroundings, tuple[int, ...], int], LabelSpace] = {}
        self._runs: dict[tuple[tuple[Pins, ...], bool], tuple[LayerRun, ...]] = {}

    def priced(self, pricer: Pricer) -> Known:
        """What is known whatever things cost, with calls at another's prices."""
        other = Known(pricer)
        other.spaces, other._runs = self.spaces, self._runs
        return other

    def runs(self, graph: OpGraph, pins: Sequence[Pins], staged: bool = False) -> tuple[LayerRun, ...]:
        """The model's runs of equal layers under limits (`layer_runs`)."""
        key = (tuple(pins), staged)
        if key not in self._runs:
            self._runs[key] = layer_runs(graph, pins, staged)
        return self._runs[key]


@dataclass
class Chains:
    """Tables and columns of a model's layers over a mesh.

    `shares`: devices' worth of memory that all layers together have (stages of a pipeline). `in_flight`: numbers of
    microbatches under way that are reckoned with. `known`: of whoever shares it.
    """

    runs: tuple[LayerRun, ...]
    setting: Setting
    pricer: Pricer
    budget: Budget
    relayouts: RelayoutPrices
    known: Known
    shares: int = 1
    in_flight: tuple[int, ...] = (1,)
    states: dict[Layout, int] = field(default_factory=dict)
    _tables: list[RunTables | None] = field(default_factory=list)

    @property
    def possible(self) -> bool:
        """Whether pins and batch leave every layer layouts for its values at both ends and a way to be kept."""
        ends = [(run.around, *run.around.states(self.setting.sizes, self.setting.batch)) for run in self.runs]
        return all(
            behind
            and any(not zero or data_axes_of(x, around.entry.batch_dim) for x in before for zero in around.pins.zero)
            for around, before, behind in ends
        )

    # --- tables ---------------------------------------------------------------------------------------------------

    def rough_tables(self) -> None:
        """Make the tables of the longest run alone, at every other price of the ladder: others are None, free."""
        longest = max(self.runs, key=lambda run: run.count)
        costs = {longest.around: self._costs_of(longest)}
        self._make_tables(costs, self._bounding(self._ladder(costs)[::2]))

    def bound_tables(self) -> None:
        """Make the tables at a coarse ladder of prices."""
        costs = self._all_costs()
        self._make_tables(costs, self._bounding(self._ladder(costs)))

    def refined_tables(self) -> None:
        """Tables for columns: at a coarse ladder of prices, then at a fine one around the price of the best bound.

        The columns of stages serve any number in flight: every other price of the ladder, with the most in flight.
        """
        costs = self._all_costs()
        coarse = self._ladder(costs)
        if self.setting.staged:
            self._make_tables(costs, [(price, self.in_flight[-1], 1.0) for price in coarse[::2]], bounding=False)
            return
        ladder = coarse
        if len(coarse) > 1:
            self._make_tables(costs, self._bounding(coarse))
            best = int(np.argmax(self._bounds([(price, self.in_flight[0], 1.0) for price in coarse])))
            ladder = fine_ladder(coarse, best)
        self._make_tables(costs, self._bounding(ladder), bounding=False)

    def lean_tables(self) -> None:
        """Tables for the columns that hold least."""
        self._make_tables(self._all_costs(), [], bounding=False)

    def forget(self) -> None:
        """Drop the tables: there may be hundreds."""
        self._tables = []

    def _make_tables(
        self, costs: Mapping[Surroundings, SpaceCosts], prices: list[Price], bounding: bool = True
    ) -> None:
        """Tables of the runs whose costs are given; those that only serve bounds leave dominated modes out."""
        tables = {}
        for around, cost in costs.items():
            modes = list(modes_of(around, cost.space, [*prices, self._only_bytes]))
            if bounding:
                modes = undominated(cost.space, around, self.setting, modes, self._rates)
            stored = storage_costs(cost.space, around, self.setting, modes, self._rates)
            passing = passing_seconds(cost.space, around, self.setting, self.relayouts)
            graph = label_graph(cost, passing, self.setting, modes, stored)
            solved = eliminate(graph, EXACT_ENTRIES, RELAXED_ENTRIES)
            tables[around] = RunTables(around, cost.space, modes, solved, self._number(cost.space))
        self._tables = [tables.get(run.around) for run in self.runs]

    @cached_property
    def _rates(self) -> ParameterRates:
        return ParameterRates(
            self.pricer, self.setting.mesh, self.budget.policy, self.budget.optimizer,
            self.setting.num_microbatches, self._trained_elements(), self.setting.staged,
        )  # fmt: skip

    def _ladder(self, costs: Mapping[Surroundings, SpaceCosts]) -> list[float]:
        """0, and prices at which all memory together costs some multiple of the computation of the given layers."""
        floor_s = sum(
            run.count * sum(float(np.min(f + b)) for f, b in zip(c.forward.single, c.backward.single, strict=True))
            for run in self.runs
            if (c := costs.get(run.around)) is not None
        )
        limit = self.budget.limit_bytes
        whole = None if limit is None else limit * self.shares
        return coarse_ladder(self.setting.num_microbatches * floor_s, whole)

    def _all_costs(self) -> dict[Surroundings, SpaceCosts]:
        """Costs in all surroundings; those that differ only in what passes by share them."""
        alike: dict[Surroundings, SpaceCosts] = {}
        found = {}
        for run in self.runs:
            key = replace(run.around, passing=())
            if key not in alike:
                alike[key] = self._costs_of(run)
            found[run.around] = alike[key]
        return found

    def _costs_of(self, run: LayerRun) -> SpaceCosts:
        return space_costs(self._space(run), run.around, self.setting, self.known.calls, self.relayouts)

    def _space(self, run: LayerRun) -> LabelSpace:
        """The choices there are: the same for all batches that can be dealt evenly over all devices."""
        sizes = self.setting.sizes
        key = replace(run.around, passing=()), sizes, self.setting.batch if self.setting.batch % prod(sizes) else 0
        if key not in self.known.spaces:
            self.known.spaces[key] = label_space(run.layer, run.around, sizes, self.setting.batch)
        return self.known.spaces[key]

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

    # --- bounds ---------------------------------------------------------------------------------------------------

    @property
    def bound_s(self) -> float:
        """Seconds that no plan under the limit can beat, by the prices of bytes."""
        return float(max(self._bounds(self.prices)))

    @property
    def least_bytes(self) -> float:
        """Bytes that every plan holds at least (temporaries apart)."""
        return float(self._cheapest([self._only_bytes]).costs()[0])

    @property
    def prices(self) -> list[Price]:
        """Prices of the tables under which a second counts as a second."""
        return sorted(p for p in self._known_prices() if p[2] and p[0] != ONLY_BYTES)

    @property
    def micro_prices(self) -> list[Price]:
        """Prices of the tables under which only seconds in microbatches count."""
        return sorted(p for p in self._known_prices() if not p[2])

    def step_costs(self, prices: Sequence[Price]) -> list[Floats]:
        """For each run the least cost (P, S, S) of one layer between numbered states, whatever the tied storage."""
        size = len(self.states)
        found = []
        for tables in self._tables:
            costs = np.zeros((len(prices), size, size))
            if tables is not None:
                costs = tables.steps(prices, None, tables.around.pins.zero, size).min(axis=(1, 2))
            found.append(costs)
        return found

    def _bounds(self, prices: Sequence[Price]) -> Floats:
        held = np.array([price * (self.budget.limit_bytes or 0) for price, _, _ in prices])
        bounds: Floats = self._cheapest(prices).costs() - held
        return bounds

    def _cheapest(self, prices: Sequence[Price], family: Family | None = None) -> CheapestChains:
        return CheapestChains.of(self._tables, [run.count for run in self.runs], prices, family, len(self.states))

    def _known_prices(self) -> set[Price]:
        return {price for tables in self._tables if tables is not None for price in tables.priced}

    def _bounding(self, ladder: list[float]) -> list[Price]:
        """One number in flight will do where bytes cost nothing; stages are bounded by seconds a microbatch alone."""
        counts = {price: self.in_flight if price else self.in_flight[:1] for price in ladder}
        return [(price, count, 0.0 if self.setting.staged else 1.0) for price in ladder for count in counts[price]]

    @property
    def _only_bytes(self) -> Price:
        return ONLY_BYTES, self.in_flight[0], 1.0

    # --- columns --------------------------------------------------------------------------------------------------

    def columns(self, leanest: bool = False) -> tuple[tuple[Column, ...], ...]:
        """The strategies on the cheapest chains of each run, priced exactly; `leanest`: only those that hold least.

        The leanest don't depend on the limit and are always among all.
        """
        found: list[dict[_Choice, Column]] = [{} for _ in self.runs]
        prices = [self._only_bytes] if leanest else [*self.prices, self._only_bytes]
        programs: dict[tuple[int, tuple[int, ...], str], LoweredLayer] = {}
        for r, arc in dict.fromkeys(self._promising(prices)):
            choice = self._choice(r, arc)
            if choice in found[r]:
                continue
            labels, zero, recompute = choice
            strategy = self._made[r].space.strategy(dict(enumerate(labels)), zero, recompute)
            if (r, labels, recompute) not in programs:
                programs[r, labels, recompute] = lowered(self.runs[r], strategy, self.setting)
            tie = arc.storage * 4 + zero if arc.storage >= 0 else -1
            found[r][choice] = Column(strategy, self._figures(r, strategy, programs[r, labels, recompute]), tie)
        return tuple(tuple(c.values()) for c in found)

    def choices(self, columns: Sequence[Column]) -> Choices:
        """Columns of one run as choices of the stack problem."""
        return choices_of(columns, self.states)

    def _promising(self, prices: list[Price]) -> Iterator[tuple[int, Arc]]:
        """Arcs of the cheapest chains at the prices, over all modes and for each family of modes alone."""
        families = {(m.zero, m.recompute) for t in self._made for m in t.modes}
        chains = [self._cheapest(prices, family) for family in (None, *sorted(families))]
        for p in range(len(prices)):
            for cheapest in chains:
                for arcs in cheapest.best(p, STORAGES_TRIED):
                    yield from arcs

    @property
    def _made(self) -> list[RunTables]:
        """Tables of all runs, in order: none of them is left free."""
        return [tables for tables in self._tables if tables is not None]

    def _choice(self, r: int, arc: Arc) -> _Choice:
        """What the arc stands for: many prices come to the same."""
        tables = self._made[r]
        mode = tables.modes[arc.mode]
        kept = (arc.entry, arc.exit, arc.storage)[: 2 + len(tables.space.tied)]
        return tables.solved.decode(arc.mode, kept), mode.zero, mode.recompute

    def _figures(self, r: int, strategy: LayerStrategy, program: LoweredLayer) -> LayerFigures:
        policy, optimizer = self.budget.policy, self.budget.optimizer
        return layer_figures(self.runs[r], strategy, self.setting, self.pricer, policy, optimizer, program)
