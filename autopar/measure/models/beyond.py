"""What timings say beyond a form, in a few numbers: a polynomial of the logarithms of sizes, whose exponential
multiplies the form's seconds.

Its features are scaled to about -1 ... 1 over sizes that training asks for, and stay at their ends beyond. Coefficients
are expected near 0 (or near those of devices alike), those of higher powers more so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from autopar.measure.models.form import Array, Sizes

END = 1.5
"""Features are kept between -END and END."""

SPREAD, NOISE, OUTLIER = 0.1, 0.05, 0.15
"""Spread of coefficients, of timings about the polynomial, and the residual beyond which timings count by size."""

ROUNDS = 5


@dataclass(frozen=True)
class Polynomial:
    """All products of up to `degree` of the features, `features` giving them in shape (calls, features)."""

    names: tuple[str, ...]
    features: Callable[[Sizes], list[Array]]
    degree: int

    @property
    def powers(self) -> list[tuple[int, ...]]:
        """Indices of the features in each term; the first term is the constant."""
        count = range(len(self.names))
        return [p for d in range(self.degree + 1) for p in combinations_with_replacement(count, d)]

    def terms(self, sizes: Sizes) -> list[Array]:
        """Each term, of every call: shape (calls,)."""
        columns = [np.clip(column, -END, END) for column in self.features(sizes)]
        made: dict[tuple[int, ...], Array] = {(): np.ones_like(columns[0])}
        for power in self.powers[1:]:
            made[power] = made[power[:-1]] * columns[power[-1]]
        return list(made.values())

    def at(self, coefficients: Array, sizes: Sizes) -> Array:
        """Logarithm of what seconds are multiplied by, shape (calls,): to the last digit whatever else is asked for."""
        result: Array = np.zeros_like(next(iter(sizes.values())))
        for coefficient, term in zip(coefficients.tolist(), self.terms(sizes), strict=True):
            result += coefficient * term  # a product of matrices rounds by how many calls there are
        return result

    def through(self, sizes: Sizes, logarithms: Array, expected: Array | None = None) -> Array:
        """Coefficients that explain logarithms of shape (calls,), near `expected` ones (else 0): robust regression."""
        terms = np.stack(self.terms(sizes))
        found = np.zeros(len(terms)) if expected is None else expected
        start, prior = found, np.diag(np.full(len(terms), (NOISE / SPREAD) ** 2))
        for _ in range(ROUNDS):
            weight = np.minimum(1.0, OUTLIER / np.maximum(np.abs(found @ terms - logarithms), 1e-9))
            weighted = terms * weight
            found = start + np.linalg.solve(weighted @ terms.T + prior, weighted @ (logarithms - start @ terms))
        return found


def octaves(column: Array, middle: float, reach: float) -> Array:
    """A feature: how many times `reach` doublings a size is from 2^middle."""
    result: Array = (np.log2(np.maximum(column, 1e-9)) - middle) / reach
    return result
