"""What timings say beyond a form: a Gaussian process over the logarithms of sizes (Rasmussen and Williams, 2006).

The covariance of two calls is a constant, and an exponential of their distance, each once for all calls and once for
those of one variant (a kernel, a library, a collective), or as far as they share its wider ones; how much of each is
what makes the timings most likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.measure.models.form import Array

Labels = NDArray[np.str_]
"""Names of variants of calls, the narrowest first, shape (calls, levels)."""

BIASES = (0.01, 0.05, 0.2)
"""Choices for the spread of the constants."""

CHOSEN_BY = 300
"""Timings by which the choices are made, at most."""

MOST = 1000
"""Timings taken into account at most."""

SLICE = 4096
"""Calls looked at in one go."""

REACHES = (1.0, 3.0, 10.0)
SPREADS = (0.01, 0.03, 0.08, 0.2, 0.4)
NOISES = (0.02, 0.04, 0.08, 0.16)
OWN = (0.3, 1.0)
"""Choices for the reach of the exponential, its spread, the noise, and the share of variance a variant has alone."""

ODD, ROUNDS = 2.0, 4
"""A timing that all the others miss by more than so many spreads has the noise that makes it one of so many, found in
rounds: of kernels that are at times half as slow again, the usual time counts."""


@dataclass(frozen=True)
class Covariance:
    """Spread of the constants, reach and spread of the exponential, the share a variant has alone, and the noise."""

    bias: float
    reach: float
    spread: float
    own: float
    noise: float

    def between(self, apart: Array, same: Array) -> Array:
        """Covariance of calls that are `apart`, and share so much of their variants (0 to 1); both of one shape."""
        shape = self.bias**2 + self.spread**2 * np.exp(-apart / self.reach)
        result: Array = shape * ((1 - self.own) + self.own * same) + self.bias**2 * same
        return result

    def of(self, apart: Array, same: Array, noisier: Array | float = 1.0) -> Array:
        """Covariance of timings, noise included: each so many times the usual one's variance."""
        matrix = self.between(apart, same)
        matrix[np.diag_indices_from(matrix)] += self.noise**2 * noisier
        return matrix

    def likelihood(self, apart: Array, same: Array, logarithms: Array) -> float:
        """Logarithm of the likelihood of timings, but for a constant."""
        lower = np.linalg.cholesky(self.of(apart, same))
        white = np.linalg.solve(lower, logarithms)
        return -0.5 * float(white @ white) - float(np.log(np.diag(lower)).sum())


CHOICES = [Covariance(*choice) for choice in product(BIASES, REACHES, SPREADS, OWN, NOISES)]


@dataclass(frozen=True)
class Residual:
    """Logarithm of measured over predicted seconds, known at `places` of shape (timings, features)."""

    places: Array
    labels: Labels
    weights: Array
    covariance: Covariance

    @classmethod
    def through(cls, places: Array, labels: Labels, logarithms: Array) -> Residual:
        """The likeliest of all choices for these timings, at least one."""
        chosen = np.random.default_rng(0).permutation(len(places))[:MOST]
        places, labels, logarithms = places[chosen], labels[chosen], np.clip(logarithms[chosen], -1.0, 1.0)
        apart, same = _distances(places, places), _same(labels, labels)
        some = slice(CHOSEN_BY)
        best = max(CHOICES, key=lambda one: one.likelihood(apart[some, some], same[some, some], logarithms[some]))
        noisier = np.ones(len(places))
        for _ in range(ROUNDS):
            inverse = np.linalg.inv(best.of(apart, same, noisier))
            weights, open_ = inverse @ logarithms, 1 / np.diag(inverse)  # by all the others, and the variance then
            usual = np.maximum(open_ - best.noise**2 * (noisier - 1), 1e-12)
            noisier = np.maximum(1.0, (weights * open_) ** 2 / (ODD**2 * usual))
        return cls(places, labels, weights, best)

    def at(self, places: Array, labels: Labels) -> Array:
        """The expected logarithm at other places, shape (calls,)."""
        parts: list[Array] = [np.zeros(0)]
        for i in range(0, len(places), SLICE):
            apart = _distances(places[i : i + SLICE], self.places)
            same = _same(labels[i : i + SLICE], self.labels)
            parts.append(self.covariance.between(apart, same) @ self.weights)
        return np.concatenate(parts)


def _same(first: Labels, second: Labels) -> Array:
    result: Array = (first[:, None, :] == second[None, :, :]).mean(axis=-1)
    return result


def _distances(first: Array, second: Array) -> Array:
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None, :] - 2 * first @ second.T
    result: Array = np.sqrt(np.maximum(squares, 0.0))
    return result
