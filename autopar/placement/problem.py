"""Placing the stages of a pipeline on places (nodes) whose links differ: the problem, what an answer costs.

Each stage takes a *group* of equally many places, one for each replica. Of a pair of places two figures count: what
one adds to the other's gradient sum if they share a stage, and what sending between them takes if they are of
neighbouring stages. The cost (Yuan et al., "Decentralized training of foundation models in heterogeneous environments",
2022) is that of the slowest sum, and of the way through the stages, each hop as slow as its slowest pair:

    max over groups, over d in the group, of the sum over the others d' of sum_s[d, d']
    + sum over neighbouring groups of min over perfect matchings of max over matched pairs of hop_s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.placement.matching import bottleneck

Floats: TypeAlias = NDArray[np.float64]
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """`groups` stages over places with (N, N) seconds of a pair, both symmetric; N is a multiple of `groups`.

    `start`: the groups to begin with, by default neighbours together. Places are exchanged only where their `kinds`
    are equal (by default all are), so that each group keeps the kinds that it begins with.
    """

    sum_s: Floats
    hop_s: Floats
    groups: int
    kinds: tuple[int, ...] = ()

    @property
    def places(self) -> int:
        """Number of places."""
        return len(self.sum_s)

    @property
    def size(self) -> int:
        """Places of a group."""
        return self.places // self.groups

    @property
    def start(self) -> Groups:
        """Neighbouring places as groups."""
        return tuple(tuple(range(g * self.size, (g + 1) * self.size)) for g in range(self.groups))


@dataclass(frozen=True)
class Placement:
    """Groups in the order of the stages; places at one position of neighbouring groups send to each other.

    `sum_s`: seconds of the slowest group's sums, `hops_s`: of each hop. `lower_bound_s`: no placement costs less.
    """

    groups: Groups
    sum_s: float
    hops_s: tuple[float, ...]
    lower_bound_s: float

    @property
    def cost_s(self) -> float:
        """Seconds of the sums and of the way through the stages."""
        return self.sum_s + sum(self.hops_s)


def problem_of_links(
    latency_s: Floats, bytes_per_s: Floats, groups: int, sum_bytes: float, hop_bytes: float, kinds: tuple[int, ...] = ()
) -> PlacementProblem:
    """The problem of links with latencies and rates (N, N): `sum_bytes` are summed over each group, in as many shares
    as it has places, and `hop_bytes` go forward and back between neighbouring stages."""
    size = len(latency_s) // groups
    sums, hops = (2 * (latency_s + b / bytes_per_s) for b in (sum_bytes / size, hop_bytes))
    np.fill_diagonal(sums, 0.0)
    return PlacementProblem(sums, hops, groups, kinds)


def sum_seconds(problem: PlacementProblem, group: Sequence[int]) -> float:
    """Seconds of the sums of one group."""
    rows = list(group)
    return float(problem.sum_s[np.ix_(rows, rows)].sum(axis=1).max())


def placed(problem: PlacementProblem, groups: Groups, lower_bound_s: float) -> Placement:
    """The placement of groups in this order, the places of each put where their partners in front are."""
    lined, hops = [groups[0]], []
    for _, behind in pairwise(groups):
        costs = problem.hop_s[np.ix_(list(lined[-1]), list(behind))]
        seconds, partner = bottleneck(costs)
        hops.append(seconds)
        lined.append(behind if np.diag(costs).max() <= seconds else tuple(behind[i] for i in partner))
    return Placement(tuple(lined), max(sum_seconds(problem, g) for g in groups), tuple(hops), lower_bound_s)
