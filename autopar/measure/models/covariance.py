"""How alike timings of calls are expected to be, learned from timings (Rasmussen and Williams, 2006, chapters 4 and 5).

The covariance of two calls is a sum over levels (all calls, those of one library, of one kernel, ...), each with a
constant and an exponential of their distance for calls that share the level's label, and of how alike the ways are in
which other devices differ there. Distances have a reach for each feature. What of each there is makes the timings
likeliest, but for what is expected of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.measure.models.form import Array

Labels = NDArray[np.str_]

LEVEL, SPREAD, REACH, NOISE = np.log((0.1, 0.07, 3.0, 0.05))
"""Logarithms expected of the spreads of constants and of exponentials, of their reach, and of the noise."""

SURPRISE = {"level": 1.0, "spread": 1.0, "reach": 0.7, "noise": 0.7}
"""How far these may be from there."""

WAYS = 1.0
"""How much of the mean way in which others differ is expected here, as a spread about none of it."""

FURTHEST = 1.0
"""Logarithm of the largest factor by which another device's way is taken to differ."""

ROUNDS, STEP, LARGEST_STEP = 40, 0.3, 0.7
"""Steps uphill, the first, and the largest: each coordinate's own, longer while its slope keeps its sign (Rprop)."""


@dataclass(frozen=True)
class Where:
    """What is known of calls: features (calls, features), labels (calls, levels), others' ways (calls, others)."""

    places: Array
    labels: Labels
    ways: Array

    def __getitem__(self, chosen: slice | NDArray[np.intp]) -> Where:
        return Where(self.places[chosen], self.labels[chosen], self.ways[chosen])

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Pairs:
    """Of pairs of calls (a, b): squared distances by feature, equal labels by level (0 or 1), likeness of ways."""

    squares: Array
    same: Array
    ways: Array


@dataclass(frozen=True)
class Covariance:
    """Logarithms: `level` and `spread` by level, `reach` by feature, `noise`; and which columns these are of."""

    level: Array
    spread: Array
    reach: Array
    noise: float
    features: tuple[int, ...]
    levels: tuple[int, ...]
    centre: Array

    @classmethod
    def expected(cls, where: Where) -> Covariance:
        """Before any timing: of features that differ between calls, and levels that part them each in another way."""
        features = tuple(np.flatnonzero(np.ptp(where.places, axis=0) > 0).tolist())
        parted = {
            tuple(np.unique(column, return_inverse=True)[1]): i for i, column in reversed([*enumerate(where.labels.T)])
        }
        levels = tuple(sorted(i for parts, i in parted.items() if any(parts)))
        count = 1 + len(levels)
        shared = SPREAD - 0.5 * np.log(count)
        level, spread, reach = np.full(count, LEVEL), np.full(count, shared), np.full(len(features), REACH)
        return cls(level, spread, reach, NOISE, features, levels, where.ways.mean(axis=0))

    @property
    def noise_variance(self) -> float:
        """Of a usual timing."""
        return float(np.exp(2 * self.noise))

    def pairs(self, first: Where, second: Where) -> Pairs:
        """All pairs of two lists of calls."""
        apart = [first.places[:, None, i] - second.places[None, :, i] for i in self.features]
        same = [first.labels[:, None, i] == second.labels[None, :, i] for i in self.levels]
        shape = (len(first), len(second))
        squares = np.square(np.array(apart)).reshape(-1, *shape)
        ways = self._ways(first) @ self._ways(second).T
        return Pairs(squares, np.array([np.ones(shape), *same], dtype=np.float64), ways)

    def _ways(self, where: Where) -> Array:
        away = np.clip(where.ways - self.centre, -FURTHEST, FURTHEST)
        spread: Array = away * (WAYS / np.sqrt(max(1, len(self.centre))))
        return spread

    def between(self, pairs: Pairs) -> Array:
        """Covariance of calls, without noise."""
        near = np.exp(-self._apart(pairs))
        result: Array = _weighed(self.level, pairs.same) + _weighed(self.spread, pairs.same) * near + pairs.ways
        return result

    def _apart(self, pairs: Pairs) -> Array:
        apart: Array = np.sqrt(_weighed(-self.reach, pairs.squares))
        return apart

    def slopes(self, pairs: Pairs, by_entry: Array, noisier: Array) -> list[Array | float]:
        """Derivatives by level, spread, reach and noise of what has the derivatives `by_entry` by the covariance."""
        apart = self._apart(pairs)
        near = np.exp(-apart)
        levels = 2 * np.exp(2 * self.level) * np.tensordot(pairs.same, by_entry, 2)
        spreads = 2 * np.exp(2 * self.spread) * np.tensordot(pairs.same, by_entry * near, 2)
        bent = by_entry * near * _weighed(self.spread, pairs.same) / np.maximum(apart, 1e-9)
        reaches = np.exp(-2 * self.reach) * np.tensordot(pairs.squares, bent, 2)
        return [levels, spreads, reaches, 2 * self.noise_variance * float(np.diag(by_entry) @ noisier)]


def learned(start: Covariance, where: Where, logarithms: Array, noisier: Array, expected: Covariance) -> Covariance:
    """The likeliest covariance of timings (each with so many times the usual variance of noise), found uphill."""
    pairs = start.pairs(where, where)
    now, step, before = _vector(start), np.full(len(_vector(start)), STEP), np.zeros(len(_vector(start)))
    middle, width = _vector(expected), _widths(expected)
    best, best_value = start, -np.inf
    for _ in range(ROUNDS):
        covariance = _like(start, now)
        matrix = covariance.between(pairs) + np.diag(covariance.noise_variance * noisier)
        inverse = np.linalg.inv(matrix)
        weights = inverse @ logarithms
        value = -0.5 * float(
            logarithms @ weights + np.linalg.slogdet(matrix)[1] + np.sum(((now - middle) / width) ** 2)
        )
        if value > best_value:
            best, best_value = covariance, value
        slopes = covariance.slopes(pairs, 0.5 * (np.outer(weights, weights) - inverse), noisier)
        slope = np.hstack(slopes) - (now - middle) / width**2
        turned = np.sign(slope) * np.sign(before)
        step = np.minimum(step * np.choose((turned + 1).astype(int), (0.5, 1.0, 1.2)), LARGEST_STEP)
        before = np.where(turned < 0, 0.0, slope)
        now = now + np.sign(before) * step
    return best


def _weighed(logarithms: Array, parts: Array) -> Array:
    result: Array = np.tensordot(np.exp(2 * logarithms), parts, 1)
    return result


def _vector(one: Covariance) -> Array:
    return np.hstack([one.level, one.spread, one.reach, one.noise])


def _widths(one: Covariance) -> Array:
    parts = {"level": one.level, "spread": one.spread, "reach": one.reach, "noise": np.zeros(1)}
    return np.hstack([np.full(len(part), SURPRISE[name]) for name, part in parts.items()])


def _like(one: Covariance, vector: Array) -> Covariance:
    count = len(one.level)
    level, spread, reach = vector[:count], vector[count : 2 * count], vector[2 * count : -1]
    return Covariance(level, spread, reach, float(vector[-1]), one.features, one.levels, one.centre)
