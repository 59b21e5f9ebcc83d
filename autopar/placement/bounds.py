"""What no placement can cost less than."""

from __future__ import annotations

import numpy as np

from autopar.placement.path import spanning_seconds
from autopar.placement.problem import PlacementProblem


def lower_bound(problem: PlacementProblem) -> float:
    """Seconds of sums and hops that every placement takes at least.

    Sums: each place has at least its cheapest partners. Hops: each is as slow as the mean of its pairs, and these pairs
    are as many ways through all stages as a group has places: together a forest of so many pieces over all places.
    """
    nearest = np.sort(problem.sum_s + np.diag(np.full(problem.places, np.inf)), axis=1)[:, : problem.size - 1]
    sums = float(nearest.sum(axis=1).max()) if problem.size > 1 else 0.0
    return sums + spanning_seconds(problem.hop_s, problem.size) / problem.size
