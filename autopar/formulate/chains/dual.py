"""A price for bytes: the Lagrangian dual of a byte limit, maximised along its cutting planes.

With a price on bytes the cheapest chain costs V(price), and V(price) - price * limit bounds all chains under the limit.
As a function of the price that is concave and made of lines, one for each chain; between a chain that holds too much
and one that fits the next price to try is where their lines cross (J. E. Kelley, "The cutting-plane method for solving
convex programs", 1960).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np

from autopar.formulate.layers.ladder import ONLY_BYTES
from autopar.formulate.layers.tables import Price

CLOSE = 2e-3
"""A bound is not improved any more if it can gain no more than this share."""
FIRST, FURTHER = 0.5, 4.0
"""The first price makes the bytes that can be saved cost this share of all seconds; further ones so many times more."""
GUESSES = (0.3, 1.0, 3.0)
"""Of the first price."""
SPREAD, BETWEEN = 2.5, 5
"""Around the best price: by how much prices differ at most, and how many there are."""
FAR = (0.1, 1.5)
"""Prices, as shares of all seconds for all bytes, for stages that differ in what they hold."""
WIDE = (0.02, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The same, for where the prices around the best one leave no good choice."""
SMALL = 0.02
"""Where bytes cost nothing: the price, as a share of all seconds for all bytes, at which they begin to."""


PASSES: Price = (0.0, 1, 0.0)
"""The seconds of passes alone, whatever bytes and what is done once a step cost."""


@dataclass(frozen=True)
class Point:
    """The cheapest chain at a price: its cost, and the bytes it holds (with the price's number in flight)."""

    price: float
    cost_s: float
    held_bytes: float

    @property
    def seconds(self) -> float:
        """What it costs beside its bytes."""
        return self.cost_s - self.price * self.held_bytes


@dataclass
class Dual:
    """Prices for the bytes of chains with so many microbatches in flight, under a limit (None: none).

    `passes`: whether the seconds of passes alone are wanted, too.
    """

    limit_bytes: float | None
    in_flight: tuple[int, ...]
    passes: bool
    points: dict[int, dict[float, Point]] = field(default_factory=dict)
    least_bytes: dict[int, float] = field(default_factory=dict)
    free_s: float = 0.0

    def first(self) -> list[Price]:
        """Seconds alone, and bytes alone."""
        return [(0.0, self.in_flight[0], 1.0), (ONLY_BYTES, self.in_flight[0], 1.0), *[PASSES] * self.passes]

    def asked(self, seeds: Iterable[Price] = ()) -> list[Price]:
        """The prices to try next, at first also `seeds`; none where no better bound is to be found."""
        counts = self.in_flight if self.limit_bytes is not None else self.in_flight[:1]
        found = [(ONLY_BYTES, q, 1.0) for q in counts if q not in self.least_bytes]
        if not self.points:
            found += [self.first()[0], *[PASSES] * self.passes, *(seeds or self._guesses())]
        else:
            found += [(price, q, 1.0) for q in self.in_flight for price in self._next(q)]
        return list(dict.fromkeys(found))

    def near(self) -> list[Price]:
        """The best price for each number in flight, and those between which a better one would be."""
        found: dict[Price, None] = {}
        for q in self.in_flight if self.limit_bytes is not None else ():
            ends = self._around(list(self.points[q].values()), self.limit_bytes or 0.0)
            prices = {self._best(q, self.limit_bytes or 0.0), *(end.price for end in ends if end)}
            found |= dict.fromkeys((price, q, 1.0) for price in sorted(prices - {0.0}))
        return list(found)

    def note_first(self, free_s: float, least_bytes: float) -> None:
        """What the cheapest chain for seconds alone costs, and what the leanest holds."""
        self.free_s, self.least_bytes[self.in_flight[0]] = free_s, least_bytes

    def _guesses(self) -> Iterator[Price]:
        """A price to begin with where seconds alone may lead to chains that hold too much."""
        if self.limit_bytes and 0.0 < self.free_s < inf:
            for times in GUESSES:
                yield times * FIRST * self.free_s / self.limit_bytes, self.in_flight[-1], 1.0

    def note(self, price: Price, cost_s: float, held_bytes: float, saved_bytes: float) -> None:
        """The cheapest chain at a price costs `cost_s` and holds so much, and for each microbatch in flight so much."""
        each, count, _ = price
        if price == PASSES:
            return
        if each == ONLY_BYTES:
            self.least_bytes[count] = cost_s
            return
        for q in self.in_flight if not each else (count,):
            self.points.setdefault(q, {})[each] = Point(each, cost_s, held_bytes + q * saved_bytes)

    @property
    def bound_s(self) -> float:
        """The best bound for the first number in flight."""
        return self._bound(self.in_flight[0]) if self.points else self.free_s

    def fine(self) -> list[float]:
        """0, and prices around the best one, of one number in flight; with several 0, far ones and the best of each."""
        points, limit = self.points[self.in_flight[0]], self.limit_bytes
        if limit is None or not np.isfinite(points[0.0].cost_s):
            return [0.0]
        whole = points[0.0].cost_s / limit
        best = sorted({self._best(q, limit) for q in self.in_flight} - {0.0})
        if len(self.in_flight) > 1:
            return sorted({0.0, *(share * whole for share in FAR), *best})
        if not best:
            return [0.0, SMALL * whole / 4, SMALL * whole]
        return [0.0, *np.geomspace(best[0] / SPREAD, best[0] * SPREAD, BETWEEN).tolist()]

    def wide(self) -> list[float]:
        """Prices far apart; none without a limit or where nothing is legal."""
        cheapest = self.points[self.in_flight[0]][0.0].cost_s
        return [s * cheapest / self.limit_bytes for s in WIDE] if self.limit_bytes and np.isfinite(cheapest) else []

    def _best(self, count: int, limit: float) -> float:
        points = self.points[count]
        return max(points, key=lambda price: points[price].cost_s - price * limit)

    def _bound(self, count: int) -> float:
        return max(point.cost_s - point.price * (self.limit_bytes or 0.0) for point in self.points[count].values())

    def _next(self, count: int) -> Iterator[float]:
        """The next price with so many in flight."""
        points = self.points.get(count, {})
        if self.limit_bytes is None or self.least_bytes.get(count, 0.0) > self.limit_bytes or not points:
            return
        low, high = self._around(list(points.values()), self.limit_bytes)
        if low is None or not np.isfinite(low.cost_s):
            return
        if high is None:
            saved = max(1.0, low.held_bytes - self.least_bytes.get(count, 0.0))
            first = FURTHER * low.price or FIRST * low.cost_s / saved
            yield from (first, FURTHER * first)
            return
        price = (high.seconds - low.seconds) / (low.held_bytes - high.held_bytes)
        most = low.seconds + price * (low.held_bytes - self.limit_bytes)
        if price not in points and most > self._bound(count) * (1 + CLOSE):
            yield price
            yield from (sqrt(price * end) for end in (low.price, high.price) if end)

    @staticmethod
    def _around(points: Sequence[Point], limit: float) -> tuple[Point | None, Point | None]:
        """The dearest price at which the chain holds too much, the cheapest at which it fits."""
        low = max((p for p in points if p.held_bytes > limit), key=lambda p: p.price, default=None)
        high = min((p for p in points if p.held_bytes <= limit), key=lambda p: p.price, default=None)
        return low, high
