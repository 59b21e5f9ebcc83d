"""The labelling problem of a layer in many modes, of several settings at once: what elimination minimises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.engine.label_graph import LabelGraph, Labels
from autopar.formulate.layers.labels import LabelSpace
from autopar.formulate.layers.tables import Array, Mode, Pair, Setting, SpaceCosts


class Part(NamedTuple):
    """A layer in one setting, and the modes asked for.

    `passing` (entry, exit) are the seconds that values passing the layer by take, `stored` are variables with what
    keeping parameters costs on their labels in each mode (`storing.py`).
    """

    costs: SpaceCosts
    passing: Array
    setting: Setting
    modes: Sequence[Mode]
    stored: Sequence[tuple[int, Array]]


@dataclass(frozen=True, eq=False)
class Choice:
    """Which costs of a space are asked for: of the entry at the labels `entries`, of pairs at those of `picks`."""

    space: LabelSpace
    picks: Mapping[Pair, tuple[Labels, Labels]]
    entries: Labels

    @classmethod
    def whole(cls, space: LabelSpace) -> Choice:
        """All costs."""
        labels = [np.arange(len(variable)) for variable in space.variables]
        ends = {(edge.source.variable, edge.target.variable) for edge in space.edges} | {(space.entry, space.exit)}
        return cls(space, {(i, j): (labels[i], labels[j]) for i, j in ends}, labels[space.entry])

    @cached_property
    def ends(self) -> list[int]:
        """Where each variable's labels begin in a line of all."""
        return [0, *accumulate(map(len, self.space.variables))]

    def at(self, pair: Pair) -> tuple[Labels, Labels]:
        """The labels of both sides of a pair."""
        (i, j), (a, b) = pair, self.picks[pair]
        return (self.entries[a] if i == self.space.entry else a), (self.entries[b] if j == self.space.entry else b)

    def pairs_of(self, costs: SpaceCosts) -> Array:
        """Seconds of all pairs one after the other (kinds, all labels of both sides)."""
        if self not in costs.chosen:
            kinds = np.arange(len(costs.kinds))
            found = [table[np.ix_(kinds, *self.at(pair))] for pair, table in costs.pair.items()]
            costs.chosen[self] = np.concatenate([table.reshape(len(kinds), -1) for table in found], axis=1)
        return costs.chosen[self]


def label_graph(parts: Sequence[Part]) -> LabelGraph:
    """The labelling problem of a layer with one scenario for each mode of each part; all parts have one space.

    Entry, exit and tied variables stay open.
    """
    space = parts[0].costs.space
    sizes = tuple(len(v) for v in space.variables)
    return LabelGraph(sizes, *label_costs(parts, Choice.whole(space)), (space.entry, space.exit, *space.tied))


def label_costs(parts: Sequence[Part], choice: Choice) -> tuple[dict[int, Array], dict[Pair, Array]]:
    """Costs of `label_graph` by variable and by pair of variables; what is stored is that of the entries chosen."""
    space, owner = choice.space, np.repeat(np.arange(len(parts)), [len(part.modes) for part in parts])
    modes = [mode for part in parts for mode in part.modes]
    kinds = parts[0].costs.kinds
    kind = np.array([kinds.index(mode.recompute) for mode in modes], dtype=np.intp)
    # No weight is 0: what is illegal costs inf, and 0 times inf is no number.
    weights = np.maximum([[mode.second_weight] for mode in modes], np.finfo(float).tiny)
    weights *= np.array([[part.setting.num_microbatches] for part in parts])[owner]
    prices = np.array([[mode.byte_price * mode.in_flight] for mode in modes])
    seconds, kept = ([part.costs.in_line[i] for part in parts] for i in (0, 1))
    line = weights * _of_modes(seconds, owner, kind) + prices * _of_modes(kept, owner, kind)
    unary = {v: line[:, a:b] for v, (a, b) in enumerate(pairwise(choice.ends))}
    unary[space.entry] = unary[space.entry][:, choice.entries]
    for same in zip(*(part.stored for part in parts), strict=True):
        unary[same[0][0]] += np.concatenate([kept for _, kept in same])
    pair: dict[Pair, Array] = {}
    if parts[0].costs.pair:
        line = weights * _of_modes([choice.pairs_of(part.costs) for part in parts], owner, kind)
        begin = 0
        for key in parts[0].costs.pair:
            shape = tuple(map(len, choice.picks[key]))
            pair[key] = line[:, begin : begin + prod(shape)].reshape(-1, *shape)
            begin += prod(shape)
    ends = (space.entry, space.exit)
    passing = np.stack([part.passing[np.ix_(*choice.at(ends))] for part in parts])
    pair[ends] = pair.get(ends, 0.0) + weights[:, :, None] * passing[owner]
    return unary, pair


def _of_modes(costs: Sequence[Array], owner: Labels, kind: Labels) -> Array:
    """Of each mode the costs of its part and kind; `costs` (kinds, ...) of each part."""
    if len(costs) == 1:
        return costs[0][kind]
    found: Array = np.stack(costs)[owner, kind]
    return found
