"""Between timed points: measured seconds as a function of predicted ones, piecewise straight on logarithmic axes.

The predicted seconds (of the roofline, or bytes of a collective) already order sizes by the work they are; the curve
says how this machine departs from them. Only points of one kind of op make a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SAME_SIZE = 1.05
"""Points nearer than this ratio are one size: their seconds are averaged."""

LEAST_PREDICTED = 1e-9
"""Where nothing is predicted (views) all points are one size."""


@dataclass(frozen=True)
class Curve:
    """Points of log(predicted) against log(measured), in increasing order of predicted, shape (points,) each."""

    predicted: Array
    measured: Array

    @classmethod
    def through(cls, predicted: Sequence[float], measured: Sequence[float]) -> Curve:
        """The curve through pairs of positive seconds, at least one."""
        x, y = np.log(np.maximum(predicted, LEAST_PREDICTED)), np.log(np.maximum(measured, LEAST_PREDICTED))
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
        cluster = np.concatenate([[0], np.cumsum(np.diff(x) > np.log(SAME_SIZE))])
        count = np.bincount(cluster)
        return cls(np.bincount(cluster, weights=x) / count, np.bincount(cluster, weights=y) / count)

    def at(self, predicted: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Seconds at predicted ones, and whether each lies between timed points; shape (n,).

        Beyond the largest point seconds grow in proportion; below the smallest they stay (what is left is overhead).
        """
        x = np.log(np.maximum(predicted, LEAST_PREDICTED))
        inside = (x >= self.predicted[0] - np.log(SAME_SIZE)) & (x <= self.predicted[-1] + np.log(SAME_SIZE))
        y = np.interp(x, self.predicted, self.measured) + np.maximum(0.0, x - self.predicted[-1])
        return np.exp(y), inside


def spread(predicted: Sequence[float], count: int) -> list[int]:
    """Indices of at most `count` of the values, spread evenly in logarithm from the smallest to the largest."""
    x = np.log(np.maximum(predicted, LEAST_PREDICTED))
    if len(x) <= count:
        return list(range(len(x)))
    targets = np.linspace(x.min(), x.max(), count)
    nearest = [int(np.argmin(np.abs(x - t))) for t in targets]
    return sorted(set(nearest))
