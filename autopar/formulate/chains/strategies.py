"""The strategies worth having for every layer over a mesh: tables of all of them, and the cheapest chains' priced.

Every layer class is solved by elimination for all pairs of states at its cuts, in every mode (ZeRO level and axes,
recomputation) and for a ladder of prices per byte. The cheapest chain at a price is a Lagrangian lower bound on every
plan under the byte limit. The strategies on the cheapest chains (for each price, of all modes together and of each
mode alone) are lowered and priced exactly: they are the columns that scenarios choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod
from typing import NamedTuple

from autopar.cost.layer import LayerWork, figures_of_all
from autopar.cost.pricer import Pricer
from autopar.cost.storages import Storages
from autopar.engine.stack_problem import Choices, Floats
from autopar.formulate.chains.columns import Budget, Column, choices_of
from autopar.formulate.chains.dual import Dual
from autopar.formulate.chains.figures import Asked, LoweredLayer, layer_work
from autopar.formulate.chains.known import Known
from autopar.formulate.chains.preselect import Labelling, unbeaten
from autopar.formulate.chains.reckoning import Reckoning
from autopar.formulate.chains.siblings import WHOLE, Siblings
from autopar.formulate.layers.labels import LabelSpace, label_space
from autopar.formulate.layers.ladder import ONLY_BYTES
from autopar.formulate.layers.rates import ParameterRates
from autopar.formulate.layers.relayout_prices import RelayoutPrices
from autopar.formulate.layers.run_tables import Arc, CheapestChains, Family, RunTables
from autopar.formulate.layers.runs import LayerRun, Surroundings, alike
from autopar.formulate.layers.tables import Least, Price, Setting, SpaceCosts, space_costs
from autopar.graph import Layout
from autopar.plan import LayerStrategy

FEW_LAYERS, NEAR_SHARE, NEAR_MOST = 2, 0.05, 2
"""Of layers that come so often at most: by which share dearer choices are still looked at, and how many of them."""
STORAGES_TRIED = 3
"""How many storage layouts of a tied parameter are followed up at each price."""


class Found(NamedTuple):
    """Numbers of layouts, bounds by the longest run and by all, what the layers of each run take by their calls."""

    states: dict[Layout, int]
    rough: Reckoning
    whole: Reckoning
    calls: tuple[Least, ...] | None


@dataclass(eq=False)
class Chains:
    """Tables and columns of a model's layers over a mesh.

    `shares`: devices' worth of memory that all layers together have (stages of a pipeline). `in_flight`: numbers of
    microbatches under way that are reckoned with. `known`: of whoever shares it.
    """

    runs: tuple[LayerRun, ...]
    setting: Setting
    pricer: Pricer
    budget: Budget
    known: Known
    shares: int = 1
    in_flight: tuple[int, ...] = (1,)
    states: dict[Layout, int] = field(default_factory=dict)
    rough: Reckoning = field(init=False)
    whole: Reckoning = field(init=False)
    _tables: list[RunTables] = field(default_factory=list)

    def __post_init__(self) -> None:
        limit = None if self.budget.limit_bytes is None else float(self.budget.limit_bytes * self.shares)
        longest = max(range(len(self.runs)), key=lambda r: self.runs[r].count)
        self.rough = Reckoning(Dual(limit, self.in_flight, self.setting.staged), (longest,))
        self.whole = Reckoning(Dual(limit, self.in_flight, self.setting.staged), tuple(range(len(self.runs))))
        self.siblings.members.append(self)

    @cached_property
    def siblings(self) -> Siblings:
        """All chains over the mesh that have the same choices."""
        key = (id(self.runs), self.setting.mesh, self.setting.groups, self._own_batch, self.in_flight)
        return self.known.siblings.setdefault(key, Siblings())

    @cached_property
    def _own_batch(self) -> int:
        """The batch where the choices are laid out for it alone; 0: for all batches, in which some are illegal."""
        batch = self.setting.batch
        layers = dict.fromkeys(run.around for run in self.runs)
        shared = batch % prod(self.setting.sizes) == 0 or all(self._laid(around, 0).serves(batch) for around in layers)
        return 0 if shared else batch

    @cached_property
    def possible(self) -> bool:
        """Whether pins and batch leave every layer layouts for its values at both ends and a way to be kept."""
        ends = [(run.around, *run.around.states(self.setting.sizes, self.setting.batch)) for run in self.runs]
        return all(
            behind and any(not zero or around.zero_axes(x) for x in before for zero in around.pins.zero)
            for around, before, behind in ends
        )

    @property
    def inside(self) -> str:
        """Says where ZeRO shards over some axes alone."""
        return "" if self.runs[0].around.pins.zero_axes is None else " (ZeRO inside nodes)"

    # --- prices ---------------------------------------------------------------------------------------------------

    @property
    def relayouts(self) -> RelayoutPrices:
        """Prices of layout changes."""
        return self.known.relayouts(self.setting.mesh)

    @cached_property
    def rates(self) -> ParameterRates:
        """What keeping parameters costs: the same for any number of microbatches but one."""
        setting, several = self.setting, self.setting.num_microbatches > 1
        key = (id(self.runs), setting.mesh, setting.staged, several)
        if key not in self.known.rates:
            self.known.rates[key] = ParameterRates(
                self.pricer, setting.mesh, self.budget.policy, self.budget.optimizer,
                1 + several, self._trained_elements(), setting.staged,
            )  # fmt: skip
        return self.known.rates[key]

    def costs_in(self, around: Surroundings) -> SpaceCosts:
        """Costs of a layer in surroundings that stand for all that are `alike`."""
        key = replace(around, passing=())
        if key not in self._costs:
            same = dict.fromkeys(run.around for run in self.runs if replace(alike(run.around), passing=()) == key)
            self._costs[key] = space_costs(
                self.space_of(around), list(same), self.setting, self.known.calls, self.relayouts
            )
        return self._costs[key]

    @cached_property
    def _costs(self) -> dict[Surroundings, SpaceCosts]:
        return {}

    def space_of(self, around: Surroundings) -> LabelSpace:
        """The choices there are, some of which may be illegal at the setting's batch."""
        return self._laid(around, self._own_batch)

    def _laid(self, around: Surroundings, batch: int) -> LabelSpace:
        """The choices laid out for a batch, or (0) for one that can be dealt evenly over all devices."""
        around, sizes = replace(alike(around), passing=(), owned=()), self.setting.sizes
        key = around, sizes, batch
        if key not in self.known.spaces:
            layer = next(run.layer for run in self.runs if run.around.class_index == around.class_index)
            self.known.spaces[key] = label_space(layer, around, sizes, batch or prod(sizes))
        return self.known.spaces[key]

    def number(self, space: LabelSpace) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the layouts in front and behind."""
        ends = (space.variables[space.entry].layouts, space.variables[space.exit].layouts)
        before, behind = (tuple(self.states.setdefault(x, len(self.states)) for x in e) for e in ends)
        return before, behind

    def _trained_elements(self) -> int:
        """Elements of all parameters, a power of two."""
        total = sum(
            run.count * prod(run.layer.values[name].shape_at(1))
            for run in self.runs
            for name, owned in zip(run.layer.params, run.around.owned, strict=True)
            if owned
        )
        return 1 << max(10, total.bit_length())

    # --- bounds ---------------------------------------------------------------------------------------------------

    @property
    def level(self) -> int:
        """How well it is bounded; 0: not yet."""
        return self.siblings.level(self)

    @property
    def found(self) -> Found:
        """What bounds are made of, as far as it is known."""
        return Found(self.states, self.rough, self.whole, self.__dict__.get("calls"))

    def adopt(self, found: Found) -> None:
        """Take over what was found elsewhere."""
        self.states, self.rough, self.whole = found.states, found.rough, found.whole
        if found.calls is not None:
            self.__dict__["calls"] = found.calls

    def bound(self, level: int) -> None:
        """Find bounds, together with siblings that look as promising (`Siblings.bound`)."""
        self.siblings.bound(self, level)

    @property
    def _reckoning(self) -> Reckoning:
        """The best that there is."""
        return self.whole if self.whole.dual.points else self.rough

    @property
    def bound_s(self) -> float:
        """Seconds that no plan under the limit can beat, by the prices of bytes."""
        count, (longest,) = self.setting.num_microbatches, self.rough.numbers
        known_s = self.longest.count * self.calls[longest].both_s
        others_s = count * (self.calls_s - known_s)
        return max(count * self.calls_s, self.rough.dual.bound_s + others_s, self.whole.dual.bound_s)

    @cached_property
    def calls_s(self) -> float:
        """Seconds of a microbatch that all calls take at least, each as suits it best."""
        return sum(run.count * calls.both_s for run, calls in zip(self.runs, self.calls, strict=True))

    @property
    def longest(self) -> LayerRun:
        """The longest run of equal layers."""
        return self.runs[self.rough.numbers[0]]

    @cached_property
    def calls(self) -> tuple[Least, ...]:
        """For each run what a layer takes at least by its calls, each as suits it best."""
        return tuple(self.siblings.calls(self, alike(run.around)) for run in self.runs)

    @property
    def promise_s(self) -> float:
        """About the seconds to hope for, to compare siblings by: a pipeline's fill and drain counted."""
        count = self.setting.num_microbatches
        return self.bound_s * (count + self.setting.groups - 1) / count

    @property
    def least_bytes(self) -> float:
        """Bytes that every plan holds at least (temporaries apart); inf before it is bounded."""
        return self._reckoning.dual.least_bytes.get(self.in_flight[0], inf)

    def step_costs(self) -> tuple[list[Price], list[Floats]]:
        """Prices, and for each run the least cost (P, S, S) of one layer at each, whatever the tied storage."""
        return self._reckoning.step_costs([self.setting.num_microbatches * one.both_s for one in self.calls])

    def _cheapest(self, prices: Sequence[Price], family: Family | None = None) -> CheapestChains:
        return CheapestChains.of(self._tables, [run.count for run in self.runs], prices, family, len(self.states))

    @property
    def _only_bytes(self) -> Price:
        return ONLY_BYTES, self.in_flight[0], 1.0

    def _make_tables(self, prices: Sequence[Price]) -> None:
        """Tables for columns at some prices, and for those that hold least."""
        asked = [*prices, self._only_bytes]
        self._tables = self.siblings.tables({self: asked}, bounding=False, runs=self.runs)[self]

    # --- columns --------------------------------------------------------------------------------------------------

    def columns(self, leanest: bool = False, wide: bool = False) -> tuple[tuple[Column, ...], ...]:
        """The strategies on the cheapest chains of each run, priced exactly; `leanest`: only those that hold least.

        The leanest don't depend on the limit and are always among all. The columns of stages serve any number in
        flight: they are those with the most. `wide`: those at prices far apart, which need no more temporaries, and of
        layers that come but a few times those near the cheapest: no price makes what is inside the convex hull of
        seconds and bytes the cheapest, and several such layers would mix its corners.
        """
        self.bound(WHOLE)
        dual = self.whole.dual
        asked = () if leanest else dual.wide() if wide else dual.fine()
        prices = [(price, self.in_flight[-1], 1.0) for price in asked]
        self._make_tables(prices)
        found: list[dict[Labelling, tuple[LayerStrategy, int]]] = [{} for _ in self.runs]
        works: list[LayerWork] = []
        programs: dict[tuple[int, tuple[int, ...], str], LoweredLayer] = {}
        asked_by: dict[Storages, Asked] = {}
        asked_for = [*prices, self._only_bytes]
        arcs = list(dict.fromkeys(self._promising(asked_for, (None, *self._families))))
        plain = (None, *(family for family in self._families if family[1] == "none"))
        near = self._near(dict.fromkeys(self._promising(asked_for, plain))) if wide else ()
        chosen = [*zip(arcs, self._choices(arcs), strict=True), *near]
        for (r, arc), choice in chosen if wide else self._unbeaten(chosen):
            if choice in found[r]:
                continue
            labels, zero, recompute = choice
            space, run = self._tables[r].space, self.runs[r]
            strategy = space.strategy(dict(enumerate(labels)), zero, recompute)
            if (r, labels, recompute) not in programs:
                storages = self.known.programs(space, labels, recompute)
                if storages not in asked_by:
                    asked_by[storages] = Asked.of(storages.program, space.layer, self.setting, self.known.calls)
                lowered = LoweredLayer.of(run, strategy, self.setting, storages, asked_by[storages])
                programs[r, labels, recompute] = lowered
            found[r][choice] = strategy, arc.storage * 4 + zero if arc.storage >= 0 else -1
        for r, (run, own) in enumerate(zip(self.runs, found, strict=True)):
            for (labels, _, recompute), (strategy, _) in own.items():
                known = programs[r, labels, recompute]
                works.append(layer_work(run, strategy, self.setting, self.budget.policy, self.budget.optimizer, known))
        self._tables = []
        self._costs.clear()
        figures = iter(figures_of_all(works, self.pricer))
        return tuple(tuple(Column(strategy, next(figures), tie) for strategy, tie in own.values()) for own in found)

    def _near(self, arcs: Iterable[tuple[int, Arc]]) -> Iterator[tuple[tuple[int, Arc], Labelling]]:
        """Arcs of runs of few layers with choices that cost little more there than the cheapest."""
        for r, arc in arcs:
            if self.runs[r].count <= FEW_LAYERS:
                mode = self._tables[r].modes[arc.mode]
                for labels in self._tables[r].near(arc, NEAR_SHARE, NEAR_MOST).tolist():
                    yield (r, arc), (tuple(labels), mode.zero, mode.recompute)

    def _unbeaten(
        self, chosen: Sequence[tuple[tuple[int, Arc], Labelling]]
    ) -> Iterator[tuple[tuple[int, Arc], Labelling]]:
        """Those that none beats in all that the tables know (`unbeaten`), each once."""
        for r, tables in enumerate(self._tables):
            mine = list({labelling: (r, arc) for (run, arc), labelling in reversed(chosen) if run == r}.items())[::-1]
            if not mine:  # no chain is legal
                return
            left = unbeaten(self, tables, [own for own, _ in mine], [arc.storage for _, (_, arc) in mine])
            yield from ((mine[i][1], mine[i][0]) for i in left)

    def choices(self, columns: Sequence[Column]) -> Choices:
        """Columns of one run as choices of the stack problem."""
        return choices_of(columns, self.states)

    @property
    def _families(self) -> list[Family]:
        return sorted({(m.zero, m.recompute) for t in self._tables for m in t.modes})

    def _promising(self, prices: list[Price], families: Sequence[Family | None]) -> Iterator[tuple[int, Arc]]:
        """Arcs of the cheapest chains at the prices for families of modes, each alone; None: over all modes."""
        chains = [self._cheapest(prices, family) for family in families]
        for p in range(len(prices)):
            for cheapest in chains:
                for arcs in cheapest.best(p, STORAGES_TRIED):
                    yield from ((r, arc) for r, arc, _ in arcs)

    def _choices(self, arcs: Sequence[tuple[int, Arc]]) -> list[Labelling]:
        """What arcs stand for: many prices come to the same."""
        found: list[Labelling] = [((), 0, "")] * len(arcs)
        for r, tables in enumerate(self._tables):
            mine = [i for i, (run, _) in enumerate(arcs) if run == r]
            for i, labels in zip(mine, tables.labels([arcs[i][1] for i in mine]).tolist(), strict=True):
                mode = tables.modes[arcs[i][1].mode]
                found[i] = tuple(labels), mode.zero, mode.recompute
        return found
