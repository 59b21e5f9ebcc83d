"""Elimination of one run's layers in every mode, and the cheapest chains through the runs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from autopar.engine.eliminate import Elimination
from autopar.engine.min_plus import Place, Ways, cheapest_ways
from autopar.engine.stack_problem import Floats
from autopar.formulate.labels import LabelSpace
from autopar.formulate.runs import Surroundings
from autopar.formulate.tables import Mode, Price

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
class RunTables:
    """Elimination of one run: `table` (modes, entry, exit[, storage]); `states` number the layouts at both ends."""

    around: Surroundings
    space: LabelSpace
    modes: list[Mode]
    solved: Elimination
    states: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def storages(self) -> int:
        """In how many ways what is tied can be stored; 1 where nothing is."""
        return prod(self.solved.table.shape[3:])

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
        modes = [k for k in self.priced.get(price, ()) if self._fits(self.modes[k], family, zero)]
        table: Floats = self.solved.table[modes]
        return modes, table

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


Tables: TypeAlias = Sequence[RunTables | None]
"""Tables by run; None: its layers cost nothing and join any states."""


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
        tied = next((t for t in tables if t is not None and t.tied), None)
        zeros = (-1,) if tied is None else tied.around.pins.zero
        nothing, free = np.zeros(states), np.zeros((1, 1, 1, states, states))
        matrices = [free if t is None else t.steps(prices, family, zeros, states) for t in tables]
        return cls(tables, prices, family, zeros, cheapest_ways(counts, matrices, nothing, nothing))

    def costs(self) -> Floats:
        """(prices,): cost of the cheapest chain."""
        costs: Floats = self.ways.totals.min(axis=(1, 2))
        return costs

    def best(self, price: int, most: int) -> list[list[tuple[int, Arc]]]:
        """Arcs, each with the number of its run, of the cheapest chains at a price; of `most` storages at most."""
        totals = self.ways.totals[price].ravel()
        order = [int(i) for i in np.argsort(totals, kind="stable")[:most] if np.isfinite(totals[i])]
        return [self._arcs((price, *map(int, np.unravel_index(i, self.ways.totals.shape[1:])))) for i in order]

    def _arcs(self, place: Place) -> list[tuple[int, Arc]]:
        price, storage, zero = place
        found = []
        for r, (tables, steps) in enumerate(zip(self.tables, self.ways.way(place).steps, strict=True)):
            if tables is not None:
                arcs = [tables.arc(self.prices[price], self.family, self.zeros[zero], storage, s) for s in steps]
                found += [(r, arc) for arc in sorted(arcs, key=lambda a: (a.entry, a.exit))]
        return found
