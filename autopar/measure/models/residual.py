"""What timings say beyond a form: a Gaussian process over the logarithms of sizes (Rasmussen and Williams, 2006).

The covariance of two calls is a constant, and an exponential of their distance, each once for all calls and once for
those of one variant (a kernel, a library, a collective); how much of each is what makes the timings most likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.measure.models.form import Array

Labels = NDArray[np.str_]

BIAS = 0.05
"""Spread of the constants."""

MOST = 1000
"""Timings taken into account at most."""

SLICE = 4096
"""Calls looked at in one go."""

REACHES = (1.0, 3.0, 10.0)
SPREADS = (0.03, 0.08, 0.2)
NOISES = (0.02, 0.04, 0.08)
OWN = (0.3, 1.0)
"""Choices for the reach of the exponential, its spread, the noise, and the share of variance a variant has alone."""


@dataclass(frozen=True)
class Residual:
    """Logarithm of measured over predicted seconds, known at `places` of shape (timings, features)."""

    places: Array
    labels: Labels
    weights: Array
    reach: float
    spread: float
    own: float

    @classmethod
    def through(cls, places: Array, labels: Labels, logarithms: Array) -> Residual:
        """The likeliest of all choices for these timings, at least one."""
        chosen = np.random.default_rng(0).permutation(len(places))[:MOST]
        places, labels, logarithms = places[chosen], labels[chosen], np.clip(logarithms[chosen], -1.0, 1.0)
        apart, same = _distances(places, places), labels[:, None] == labels[None, :]
        candidates: list[tuple[float, Residual]] = []
        for reach, spread, own, noise in product(REACHES, SPREADS, OWN, NOISES):
            matrix = _covariance(apart, same, reach, spread, own) + noise**2 * np.eye(len(places))
            lower = np.linalg.cholesky(matrix)
            white = np.linalg.solve(lower, logarithms)
            likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(lower)).sum())
            weights = np.linalg.solve(lower.T, white)
            candidates.append((likelihood, cls(places, labels, weights, reach, spread, own)))
        return max(candidates, key=lambda candidate: candidate[0])[1]

    def at(self, places: Array, labels: Labels) -> Array:
        """The expected logarithm at other places, shape (calls,)."""
        parts: list[Array] = [np.zeros(0)]
        for i in range(0, len(places), SLICE):
            apart = _distances(places[i : i + SLICE], self.places)
            same = labels[i : i + SLICE, None] == self.labels[None, :]
            parts.append(_covariance(apart, same, self.reach, self.spread, self.own) @ self.weights)
        return np.concatenate(parts)


def _distances(first: Array, second: Array) -> Array:
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None, :] - 2 * first @ second.T
    result: Array = np.sqrt(np.maximum(squares, 0.0))
    return result


def _covariance(apart: Array, same: NDArray[np.bool_], reach: float, spread: float, own: float) -> Array:
    shape = BIAS**2 + spread**2 * np.exp(-apart / reach)
    result: Array = shape * ((1 - own) + own * same) + BIAS**2 * same
    return result
