"""Tables of one layer in all modes, for several settings over one mesh at once.

ZeRO shards over the data axes, which the state at the entry has: states with equal data axes can be in the same modes.
Those of all states are solved together where tables are small, else those of each such set by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from autopar.engine.eliminate import Elimination, Order, Shape
from autopar.engine.label_graph import Labels, classes_of
from autopar.engine.stack_problem import Floats
from autopar.formulate.layers.labels import LabelSpace
from autopar.formulate.layers.ladder import modes_of
from autopar.formulate.layers.mode_costs import Choice, Part, label_costs
from autopar.formulate.layers.rates import ParameterRates
from autopar.formulate.layers.run_tables import Piece, RunTables
from autopar.formulate.layers.runs import Surroundings
from autopar.formulate.layers.storing import storage_costs, undominated
from autopar.formulate.layers.tables import Mode, Price, Setting, SpaceCosts

EXACT_ENTRIES = 1 << 17
"""Largest table of an elimination (for one mode) that is exact; wider layers are solved by a bound and what it leads
to."""
RELAXED_ENTRIES = 1 << 14
"""Largest table where it is not exact."""

JOINT_ENTRIES = 1 << 12
"""Largest tables, for one mode, of entry states that are solved together."""

Axes: TypeAlias = tuple[int, ...]
Entries: TypeAlias = tuple[int, ...]
States: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Ask(NamedTuple):
    """What is asked about a layer in one setting: at which prices; `bounding`: whether dominated modes may be missing.

    `states` number the layouts at both ends.
    """

    costs: SpaceCosts
    passing: Floats
    setting: Setting
    rates: ParameterRates
    prices: Sequence[Price]
    states: States
    bounding: bool


class LayerSolver:
    """Solves one layer over one mesh; orders of elimination are found once.

    Entry states are solved together whose tables are small, else those with the same data axes.
    """

    def __init__(self, space: LabelSpace, around: Surroundings) -> None:
        self.space, self.around = space, around
        self._orders: dict[Entries, Order] = {}
        self._choices: dict[Entries, Choice] = {}
        self._entries: dict[Axes, list[int]] = {}
        for label, state in enumerate(space.variables[space.entry].layouts):
            axes = around.zero_axes(state)
            if axes or 0 in around.pins.zero:
                self._entries.setdefault(axes, []).append(label)

    def solve(self, asks: Sequence[Ask]) -> list[RunTables]:
        """The tables of each ask."""
        modes = [modes_of(self.around, ask.prices) for ask in asks]
        pieces: list[list[Piece]] = [[] for _ in asks]
        shape = tuple(len(self.space.variables[v]) for v in (self.space.entry, self.space.exit, *self.space.tied))
        tables = [np.full((len(own), *shape), np.inf) for own in modes]
        for lot in self._lots:
            own = [self._rows(ask, mine, lot) for ask, mine in zip(asks, modes, strict=True)]
            entries = self._labels(lot)
            solved = self._solved([part for _, part in own], entries)
            begin = 0
            for i, (rows, part) in enumerate(own):
                for axes, row in rows.items():
                    mine, numbers = np.array(self._entries[axes]), np.flatnonzero(row >= 0)
                    labels = np.full(shape[0], -1)
                    labels[mine] = np.searchsorted(entries, mine)
                    row = np.where(row < 0, -1, row + begin)
                    tables[i][np.ix_(numbers, mine)] = solved.table[np.ix_(row[numbers], labels[mine])]
                    pieces[i].append(Piece(solved, labels, row))
                begin += len(part.modes)
        return [
            RunTables(self.around, self.space, own, table, tuple(found), ask.states)
            for ask, own, table, found in zip(asks, modes, tables, pieces, strict=True)
        ]

    def entries(self) -> int:
        """Entries of all tables that are made for one mode."""
        return sum(self._order(self._labels(lot)).entries for lot in self._lots)

    @cached_property
    def _lots(self) -> list[tuple[Axes, ...]]:
        """Data axes whose entry states are solved together."""
        every = tuple(self._entries)
        if len(every) < 2 or self._order(self._labels(every)).entries <= JOINT_ENTRIES:
            return [every] if every else []
        return [(axes,) for axes in every]

    def _labels(self, lot: Sequence[Axes]) -> Entries:
        return tuple(sorted(label for axes in lot for label in self._entries[axes]))

    def _rows(self, ask: Ask, modes: Sequence[Mode], lot: Sequence[Axes]) -> tuple[dict[Axes, Labels], Part]:
        """The layer in all modes that entry states with data axes of the lot can be in, and for each such axes which of
        these stands for each of `modes` (-1: none)."""
        ways = {axes: [(i, _in(m, axes)) for i, m in enumerate(modes) if axes or not m.zero] for axes in lot}
        every = tuple(dict.fromkeys(mode for own in ways.values() for _, mode in own))
        stored = storage_costs(self.space, self.around, ask.setting, every, ask.rates)
        at = {mode: k for k, mode in enumerate(every)}
        places: dict[int, int] = {}
        rows: dict[Axes, Labels] = {}
        for axes, own in ways.items():
            numbers, places_of = np.array([i for i, _ in own]), [at[mode] for _, mode in own]
            if ask.bounding:
                mine = [(v, kept[places_of]) for v, kept in stored]
                count, entries = ask.setting.num_microbatches, np.array(self._entries[axes])
                left = undominated([m for _, m in own], mine, ask.costs, count, entries)
                numbers, places_of = numbers[left], [places_of[i] for i in left]
            rows[axes] = np.full(len(modes), -1)
            rows[axes][numbers] = [places.setdefault(place, len(places)) for place in places_of]
        stored = [(v, kept[list(places)]) for v, kept in stored]
        stored[0] = (self.space.entry, stored[0][1][:, list(self._labels(lot))])
        return rows, Part(ask.costs, ask.passing, ask.setting, [every[place] for place in places], stored)

    def _solved(self, parts: Sequence[Part], entries: Entries) -> Elimination:
        order = self._order(entries)
        if entries not in self._choices:
            self._choices[entries] = Choice(self.space, order.firsts, np.array(entries))
        unary, pair = label_costs(parts, self._choices[entries])
        return order.minimum(unary, pair, sum(len(part.modes) for part in parts))

    def _order(self, entries: Entries) -> Order:
        if entries not in self._orders:
            space = self.space
            sizes = [len(v) for v in space.variables]
            sizes[space.entry] = len(entries)
            alike = dict(space.alike)
            ends = (space.entry, space.exit)
            if self.around.passing or ends not in alike:
                alike[ends] = (np.arange(len(space.variables[0])), np.arange(sizes[space.exit]))
            for pair in alike:
                if space.entry in pair:
                    alike[pair] = _with_entries(alike[pair], pair.index(space.entry), entries)
            shapes = [Shape(pair, classes) for pair, classes in alike.items()]
            keep = (space.entry, space.exit, *space.tied)
            self._orders[entries] = Order.of(
                tuple(sizes), range(len(sizes)), shapes, keep, EXACT_ENTRIES, RELAXED_ENTRIES
            )
        return self._orders[entries]


def _in(mode: Mode, axes: Axes) -> Mode:
    return replace(mode, data_axes=axes) if mode.zero else mode


def _with_entries(classes: tuple[Labels, Labels], side: int, entries: Sequence[int]) -> tuple[Labels, Labels]:
    """Classes of a pair of variables of whose side `side` there are only the labels `entries`."""
    own, other = classes_of(classes[side][list(entries)].tolist())[0], classes[1 - side]
    return (own, other) if side == 0 else (other, own)
