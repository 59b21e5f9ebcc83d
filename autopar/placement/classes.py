"""Classes of places: what a group costs depends only on how many places of each class it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import TypeAlias

import numpy as np

from autopar.placement.matching import bottleneck
from autopar.placement.path import EXACT, shortest_path
from autopar.placement.problem import Floats, Groups, PlacementProblem

Mix: TypeAlias = tuple[int, ...]
"""The classes of a group's places, sorted."""


@dataclass
class Classes:
    """Places that could stand for each other are of one class, which its first place names.

    Figures of mixes are remembered. `of_place` (N,): the class of each place.
    """

    problem: PlacementProblem
    of_place: tuple[int, ...] = field(init=False)
    _sums: dict[Mix, float] = field(default_factory=dict)
    _hops: dict[tuple[Mix, Mix], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found: list[int] = []
        kinds = self.problem.kinds or (0,) * self.problem.places
        for place in range(self.problem.places):
            firsts = (f for f in dict.fromkeys(found) if kinds[f] == kinds[place] and _alike(self.problem, f, place))
            found.append(next(firsts, place))
        self.of_place = tuple(found)

    def mix(self, group: tuple[int, ...]) -> Mix:
        """The classes of a group of places."""
        return tuple(sorted(self.of_place[place] for place in group))

    def kind(self, own: int) -> int:
        """The kind of a class's places."""
        return self.problem.kinds[own] if self.problem.kinds else 0

    def kinds(self, mix: Mix) -> tuple[int, ...]:
        """The kinds of a group's places, sorted."""
        return tuple(sorted(map(self.kind, mix)))

    def groups(self, mixes: tuple[Mix, ...]) -> Groups:
        """Places for mixes, which together take every place once."""
        left: dict[int, list[int]] = {}
        for place, own in enumerate(self.of_place):
            left.setdefault(own, []).append(place)
        return tuple(tuple(left[c].pop(0) for c in mix) for mix in mixes)

    # --- seconds ------------------------------------------------------------------------------------------------------

    def cost_s(self, mixes: tuple[Mix, ...]) -> float:
        """Seconds of groups in this order."""
        return max(map(self.sum_s, mixes)) + sum(self.hop_s(a, b) for a, b in pairwise(mixes))

    def sum_s(self, mix: Mix) -> float:
        """Seconds of a group's sums."""
        if mix not in self._sums:
            table = self._sum_tables[np.ix_(mix, mix)]
            self._sums[mix] = float((table.sum(axis=1) - np.diag(table)).max())
        return self._sums[mix]

    def hop_s(self, one: Mix, other: Mix) -> float:
        """Seconds of the hop between two groups."""
        key = (one, other) if one <= other else (other, one)
        if key not in self._hops:
            self._hops[key] = bottleneck(self._hop_tables[np.ix_(one, other)])[0]
        return self._hops[key]

    def ordered(self, mixes: tuple[Mix, ...]) -> tuple[Mix, ...]:
        """The groups along the shortest way through them; of very many equal ones follow one another."""
        points = list(dict.fromkeys(mixes)) if len(mixes) > EXACT else list(mixes)
        lengths = np.zeros((len(points), len(points)))
        for a, b in combinations(range(len(points)), 2):
            lengths[a, b] = lengths[b, a] = self.hop_s(points[a], points[b])
        path = [points[g] for g in shortest_path(lengths)]
        return (
            tuple(mix for point in path for mix in [point] * mixes.count(point)) if len(mixes) > EXACT else tuple(path)
        )

    @cached_property
    def near(self) -> frozenset[int]:
        """Classes of places that are nearer to each other than to any place of another class."""
        count = Counter(self.of_place)
        rest = self._hop_tables + np.diag(np.full(self.problem.places, np.inf))
        others = list(count)
        return frozenset(c for c in others if count[c] > 1 and self._hop_tables[c, c] < rest[c, others].min())

    @cached_property
    def _sum_tables(self) -> Floats:
        return self._with_mates(self.problem.sum_s)

    @cached_property
    def _hop_tables(self) -> Floats:
        return self._with_mates(self.problem.hop_s)

    def _with_mates(self, table: Floats) -> Floats:
        """The table with what two places of a class cost each other at the place that names the class."""
        found = table.copy()
        for own in set(self.of_place):
            mates = [p for p, c in enumerate(self.of_place) if c == own and p != own]
            found[own, own] = table[own, mates[0]] if mates else 0.0
        return found


def _alike(problem: PlacementProblem, one: int, other: int) -> bool:
    """Whether exchanging two places changes no figure."""
    rest = [p for p in range(problem.places) if p not in (one, other)]
    return all(bool((table[one, rest] == table[other, rest]).all()) for table in (problem.sum_s, problem.hop_s))
