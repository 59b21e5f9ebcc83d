"""Tables of one layer in all modes, for several settings over one mesh at once.

ZeRO shards over the data axes, which the state at the entry has: states with equal data axes are solved together, each
in the modes that make sense for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from autopar.plan import data_axes_of

EXACT_ENTRIES = 1 << 17
"""Largest table of an elimination (for one mode) that is exact; wider layers are solved by a bound and what it leads
to."""
RELAXED_ENTRIES = 1 << 14
"""Largest table where it is not exact."""

Axes: TypeAlias = tuple[int, ...]
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
    """Solves one layer over one mesh; orders of elimination are found once."""

    def __init__(self, space: LabelSpace, around: Surroundings) -> None:
        self.space, self.around = space, around
        self._orders: dict[Axes, Order] = {}
        self._choices: dict[Axes, Choice] = {}
        self._entries: dict[Axes, list[int]] = {}
        for label, state in enumerate(space.variables[space.entry].layouts):
            self._entries.setdefault(data_axes_of(state, around.entry.batch_dim), []).append(label)

    def solve(self, asks: Sequence[Ask]) -> list[RunTables]:
        """The tables of each ask."""
        modes = [modes_of(self.around, ask.prices) for ask in asks]
        pieces: list[list[Piece]] = [[] for _ in asks]
        shape = tuple(len(self.space.variables[v]) for v in (self.space.entry, self.space.exit, *self.space.tied))
        tables = [np.full((len(own), *shape), np.inf) for own in modes]
        for axes, entries in self._entries.items():
            if not axes and 0 not in self.around.pins.zero:
                continue
            own = [self._modes(ask, mine, axes, entries) for ask, mine in zip(asks, modes, strict=True)]
            solved = self._solved([part for _, part in own], axes)
            labels = np.full(shape[0], -1)
            labels[entries] = np.arange(len(entries))
            row = 0
            for i, (numbers, _) in enumerate(own):
                rows = np.full(len(modes[i]), -1)
                rows[numbers] = np.arange(row, row + len(numbers))
                tables[i][np.ix_(numbers, entries)] = solved.table[row : row + len(numbers)]
                pieces[i].append(Piece(solved, labels, rows))
                row += len(numbers)
        return [
            RunTables(self.around, self.space, own, table, tuple(found), ask.states)
            for ask, own, table, found in zip(asks, modes, tables, pieces, strict=True)
        ]

    def entries(self) -> int:
        """Entries of all tables that are made for one mode."""
        return sum(self._order(axes).entries for axes in self._entries)

    def _modes(self, ask: Ask, modes: Sequence[Mode], axes: Axes, entries: Sequence[int]) -> tuple[list[int], Part]:
        """Numbers of the modes that entry states with data axes `axes` can be in, and the layer in these."""
        numbers = [i for i, m in enumerate(modes) if axes or not m.zero]
        mine = [replace(modes[i], data_axes=axes if modes[i].zero else ()) for i in numbers]
        stored = storage_costs(self.space, self.around, ask.setting, mine, ask.rates)
        if ask.bounding:
            left = undominated(mine, stored, bool(self.space.tied), np.array(entries))
            numbers, mine = [numbers[i] for i in left], [mine[i] for i in left]
            stored = [(v, kept[left]) for v, kept in stored]
        stored[0] = (self.space.entry, stored[0][1][:, entries])
        return numbers, Part(ask.costs, ask.passing, ask.setting, mine, stored)

    def _solved(self, parts: Sequence[Part], axes: Axes) -> Elimination:
        order = self._order(axes)
        if axes not in self._choices:
            self._choices[axes] = Choice(self.space, order.firsts, np.array(self._entries[axes]))
        unary, pair = label_costs(parts, self._choices[axes])
        return order.minimum(unary, pair, sum(len(part.modes) for part in parts))

    def _order(self, axes: Axes) -> Order:
        if axes not in self._orders:
            space, entries = self.space, self._entries[axes]
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
            self._orders[axes] = Order.of(tuple(sizes), range(len(sizes)), shapes, keep, EXACT_ENTRIES, RELAXED_ENTRIES)
        return self._orders[axes]


def _with_entries(classes: tuple[Labels, Labels], side: int, entries: Sequence[int]) -> tuple[Labels, Labels]:
    """Classes of a pair of variables of whose side `side` there are only the labels `entries`."""
    own, other = classes_of(classes[side][entries].tolist())[0], classes[1 - side]
    return (own, other) if side == 0 else (other, own)
