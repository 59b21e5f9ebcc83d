"""What timings say beyond a form: a Gaussian process over sizes, variants and ways of other devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.measure.models.covariance import Covariance, Where, learned
from autopar.measure.models.form import Array

CHOSEN_BY = 300
"""Timings from which the covariance is learned, at most."""

MOST = 1000
"""Timings taken into account at most."""

LARGEST = 3.0
"""Logarithms beyond count as this large: versions of a library may be several times as fast as all others."""

SLICE = 512
"""Calls looked at in one go."""

ODD, ROUNDS = 2.0, 4
"""A timing that all the others miss by more than so many spreads has the noise that makes it one of so many, found in
rounds: of kernels that are at times half as slow again, the usual time counts."""


@dataclass(frozen=True)
class Residual:
    """Logarithm of measured over predicted seconds, known at timed calls; `error` is the mean one with shapes left out.

    `weights` are all 0 where timings of other shapes foretell those of a shape no better than nothing does.
    """

    where: Where
    weights: Array
    covariance: Covariance
    error: float

    @classmethod
    def through(cls, where: Where, logarithms: Array) -> Residual:
        """What timings, at least one, say."""
        chosen = np.random.default_rng(0).permutation(len(where))[:MOST]
        where, logarithms = where[chosen], np.clip(logarithms[chosen], -LARGEST, LARGEST)
        some = slice(CHOSEN_BY)
        expected = Covariance.expected(where)
        usual = np.ones(len(where))
        found = learned(expected, where[some], logarithms[some], usual[some], expected)
        noisier, _ = _noise(found, where, logarithms)
        found = learned(found, where[some], logarithms[some], noisier[some], expected)
        noisier, inverse = _noise(found, where, logarithms)
        weights = inverse @ logarithms
        missed, plain = _missed(where, inverse, weights), float(np.abs(logarithms).mean())
        return cls(where, weights if missed < plain else np.zeros(len(where)), found, min(missed, plain))

    @property
    def says_something(self) -> bool:
        """Whether it is anything but 0."""
        return bool(self.weights.any())

    def at(self, where: Where) -> Array:
        """The expected logarithm of other calls, shape (calls,)."""
        parts: list[Array] = [np.zeros(0)]
        for i in range(0, len(where), SLICE):
            pairs = self.covariance.pairs(where[i : i + SLICE], self.where)
            parts.append(self.covariance.between(pairs) @ self.weights)
        return np.concatenate(parts)


def _noise(covariance: Covariance, where: Where, logarithms: Array) -> tuple[Array, Array]:
    """How many times the usual variance of noise each timing has, and the inverse of their covariance then."""
    alike, usual = covariance.between(covariance.pairs(where, where)), covariance.noise_variance
    noisier: Array = np.ones(len(where))
    for _ in range(ROUNDS):
        inverse = np.linalg.inv(alike + np.diag(usual * noisier))
        open_ = 1 / np.diag(inverse)  # variance by all the others
        missed = (inverse @ logarithms * open_) ** 2
        noisier = np.maximum(1.0, missed / (ODD**2 * np.maximum(open_ - usual * (noisier - 1), 1e-12)))
    found: Array = np.asarray(np.linalg.inv(alike + np.diag(usual * noisier)), dtype=np.float64)
    return noisier, found


def _missed(where: Where, inverse: Array, weights: Array) -> float:
    """The mean distance of timings from what those of all other shapes foretell."""
    shapes = np.unique(where.places, axis=0, return_inverse=True)[1].ravel()
    missed = 0.0
    for shape in range(shapes.max() + 1):
        same = np.flatnonzero(shapes == shape)
        missed += float(np.abs(np.linalg.solve(inverse[np.ix_(same, same)], weights[same])).sum())
    return missed / len(where)
