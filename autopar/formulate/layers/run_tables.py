"""Elimination of one run's layers in every mode, and the cheapest chains through the runs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from autopar.engine.eliminate import Elimination
from autopar.engine.label_graph import Labels
from autopar.engine.min_plus import Place, Ways, cheapest_ways
from autopar.engine.near import near_labellings
from autopar.engine.stack_problem import Floats
from autopar.formulate.layers.labels import LabelSpace
from autopar.formulate.layers.runs import Surroundings
from autopar.formulate.layers.tables import Mode, Price

Family: TypeAlias = tuple[int, str]
"""ZeRO level and recomputation."""


@dataclass(frozen=True)
class Arc:
    """A use of one run's table: mode index, labels at its ends and the label of the tied storage (-1: none)."""

    mode: int
    entry: int
    exit: int
    storage: int


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a run's table: of the entry states numbered `entries` (label of each, -1 elsewhere), in `solved`.

    `rows[m]` is the scenario that stands for mode m, -1 where another mode of its price is never dearer.
    """

    solved: Elimination
    entries: Labels
    rows: Labels


@dataclass(frozen=True, eq=False)
class RunTables:
    """Elimination of one run: `table` (modes, entry, exit[, storage]) put together from `pieces`.

    ZeRO shards over the data axes of the entry's state. `states` number the layouts at both ends.
    """

    around: Surroundings
    space: LabelSpace
    modes: list[Mode]
    table: Floats
    pieces: tuple[Piece, ...]
    states: tuple[tuple[int, ...], tuple[int, ...]]
    _costs: dict[object, tuple[list[int], Floats]] = field(default_factory=dict)

    @property
    def storages(self) -> int:
        """In how many ways what is tied can be stored; 1 where nothing is."""
        return prod(self.table.shape[3:])

    @cached_property
    def tied(self) -> bool:
        """Whether other layers use some of the parameters, too."""
        return bool(self.space.tied)

    @cached_property
    def priced(self) -> dict[Price, list[int]]:
        """Modes of each price."""
        found: dict[Price, list[int]] = {}
        for k, mode in enumerate(self.modes):
            found.setdefault(mode.price, []).append(k)
        return found

    def costs(self, price: Price, family: Family | None, zero: int) -> tuple[list[int], Floats]:
        """Modes of a price, a family and (where something is tied) a ZeRO level, and their table."""
        key = price, family, zero
        if key not in self._costs:
            modes = [k for k in self.priced.get(price, ()) if self._fits(self.modes[k], family, zero)]
            self._costs[key] = modes, self.table[modes]
        return self._costs[key]

    def _fits(self, mode: Mode, family: Family | None, zero: int) -> bool:
        if self.tied and mode.zero != zero:
            return False
        if family is None:
            return True
        pins = self.around.pins
        allowed = family[0] in pins.zero and family[1] in pins.recompute
        return not allowed or (family[0] if self.tied else mode.zero, mode.recompute) == family

    def steps(self, prices: Sequence[Price], family: Family | None, zeros: Sequence[int], states: int) -> Floats:
        """(prices, storages or 1, zeros or 1, S, S): least cost of a layer from state to state."""
        shape = (len(prices), self.storages, len(zeros) if self.tied else 1, states, states)
        found = np.full(shape, np.inf)
        for p, price in enumerate(prices):
            for z in range(shape[2]):
                modes, table = self.costs(price, family, zeros[z])
                if modes:
                    least = table.min(axis=0).reshape(*table.shape[1:3], -1)
                    found[p, :, z][np.ix_(range(shape[1]), *self.states)] = np.moveaxis(least, 2, 0)
        return found

    def arc(self, price: Price, family: Family | None, zero: int, storage: int, step: tuple[int, int]) -> Arc:
        """The arc of the cheapest layer between two states."""
        entry, leave = (states.index(state) for states, state in zip(self.states, step, strict=True))
        modes, table = self.costs(price, family, zero)
        own = table[:, entry, leave, storage] if self.tied else table[:, entry, leave]
        return Arc(modes[int(own.argmin())], entry, leave, storage if self.tied else -1)

    def near(self, arc: Arc, share: float, most: int) -> Labels:
        """Labels (N, V) of the variables on an arc where they cost at most `share` more than the cheapest."""
        kept = (arc.entry, arc.exit, arc.storage)[: 2 + self.tied]
        piece = next(p for p in self.pieces if p.entries[arc.entry] >= 0)
        at = (int(piece.entries[arc.entry]), *kept[1:])
        slack = share * float(self.table[(arc.mode, *kept)])
        found, _ = near_labellings(piece.solved, int(piece.rows[arc.mode]), at, slack, most)
        found[:, self.space.entry] = arc.entry
        return found

    def labels(self, arcs: Sequence[Arc]) -> Labels:
        """Labels (arcs, V) of all variables on each of some arcs."""
        found = np.zeros((len(arcs), len(self.space.variables)), dtype=np.intp)
        kept = np.array([(a.entry, a.exit, a.storage)[: 2 + self.tied] for a in arcs], dtype=np.intp)
        kept = kept.reshape(len(arcs), 2 + self.tied)
        modes = np.array([a.mode for a in arcs], dtype=np.intp)
        for piece in self.pieces:
            mine = np.flatnonzero(piece.entries[kept[:, 0]] >= 0)
            if len(mine):
                at = kept[mine]
                at[:, 0] = piece.entries[at[:, 0]]
                found[mine] = piece.solved.decode_all(piece.rows[modes[mine]], at)
        found[:, self.space.entry] = kept[:, 0]
        return found


Tables: TypeAlias = Sequence[RunTables]
"""Tables by run."""


@dataclass(frozen=True, eq=False)
class CheapestChains:
    """The cheapest chains of `counts` layers of each run at some prices, for each way to store what is tied."""

    tables: Tables
    prices: Sequence[Price]
    family: Family | None
    zeros: tuple[int, ...]
    ways: Ways

    @classmethod
    def of(
        cls, tables: Tables, counts: Sequence[int], prices: Sequence[Price], family: Family | None, states: int
    ) -> CheapestChains:
        """Find them; `states` is the number of numbered states."""
        tied = next((t for t in tables if t.tied), None)
        zeros = (-1,) if tied is None else tied.around.pins.zero
        nothing = np.zeros(states)
        matrices = [t.steps(prices, family, zeros, states) for t in tables]
        return cls(tables, prices, family, zeros, cheapest_ways(counts, matrices, nothing, nothing))

    def costs(self) -> Floats:
        """(prices,): cost of the cheapest chain."""
        costs: Floats = self.ways.totals.min(axis=(1, 2))
        return costs

    def best(self, price: int, most: int) -> list[list[tuple[int, Arc, int]]]:
        """Arcs, each with its run's number and how often it is taken, of the cheapest chains at a price.

        Of `most` storages at most.
        """
        totals = self.ways.totals[price].ravel()
        order = [int(i) for i in np.argsort(totals, kind="stable")[:most] if np.isfinite(totals[i])]
        return [self._arcs((price, *map(int, np.unravel_index(i, self.ways.totals.shape[1:])))) for i in order]

    def _arcs(self, place: Place) -> list[tuple[int, Arc, int]]:
        price, storage, zero = place
        found = []
        for r, (tables, steps) in enumerate(zip(self.tables, self.ways.way(place).steps, strict=True)):
            weight = self.prices[price], self.family, self.zeros[zero], storage
            arcs = [(r, tables.arc(*weight, step), times) for step, times in steps.items()]
            found += sorted(arcs, key=lambda a: (a[1].entry, a[1].exit))
        return found
