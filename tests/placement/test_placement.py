"""Placements against brute force over all of them, and against published ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.placement.local import place
from autopar.placement.matching import bottleneck
from autopar.placement.path import length, mended, shortest_path, spanning_seconds
from autopar.placement.problem import Placement, PlacementProblem, problem_of_links

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
CASES = REFERENCE / "dtfm_cases.npz"


def _symmetric(random: np.random.Generator, points: int) -> NDArray[np.float64]:
    """Random seconds of pairs; few different values, so that ties and classes occur."""
    half: NDArray[np.float64] = np.triu(random.integers(1, 6, (points, points)).astype(float), 1)
    both: NDArray[np.float64] = half + half.T
    return both


@pytest.mark.parametrize("seed", range(20))
def test_bottleneck_is_the_least_of_all_matchings(seed: int) -> None:
    """No perfect matching has a cheaper dearest pair, and the matching given has that one."""
    costs = np.random.default_rng(seed).integers(0, 20, (5, 5)).astype(float)
    least = min(max(costs[i, j] for i, j in enumerate(p)) for p in permutations(range(5)))
    found, columns = bottleneck(costs)
    assert found == least == max(costs[i, j] for i, j in enumerate(columns))
    assert sorted(columns) == list(range(5))


@pytest.mark.parametrize("seed", range(10))
def test_shortest_path_is_the_least_of_all_orders(seed: int) -> None:
    """No order of seven points makes a shorter way; a mended way is no shorter, and none is below the bound."""
    random = np.random.default_rng(seed)
    lengths = _symmetric(random, 7)
    least = min(length(p, lengths) for p in permutations(range(7)))
    assert length(shortest_path(lengths), lengths) == least
    better = mended(tuple(random.permutation(7).tolist()), lengths)
    assert sorted(better) == list(range(7))
    assert spanning_seconds(lengths) <= least <= length(better, lengths)


def test_many_points_on_a_line_are_visited_in_their_order() -> None:
    """Of 60 points on a line, shuffled, the shortest way is the line."""
    places = np.random.default_rng(0).permutation(60).astype(float)
    lengths = np.abs(places[:, None] - places)
    assert length(shortest_path(lengths), lengths) == 59


def _cost(problem: PlacementProblem, groups: Iterable[tuple[int, ...]]) -> float:
    """The formulas read literally, the matching by trying all."""
    groups = list(groups)
    sums = [max(sum(problem.sum_s[d, e] for e in g if e != d) for d in g) for g in groups]
    hops = [
        min(max(problem.hop_s[a, b] for a, b in zip(one, p, strict=True)) for p in permutations(other))
        for one, other in pairwise(groups)
    ]
    return float(max(sums) + sum(hops))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [2, 3])
def test_small_placements_are_the_best_of_all(groups: int, seed: int) -> None:
    """Of six places on two or three stages no other way to deal them out costs less; the bound is below."""
    random = np.random.default_rng(seed)
    problem = PlacementProblem(_symmetric(random, 6), _symmetric(random, 6) + np.eye(6), groups)
    size = problem.size
    least = min(
        _cost(problem, (order[g * size : (g + 1) * size] for g in range(groups))) for order in permutations(range(6))
    )
    found = place(problem)
    assert found.cost_s == pytest.approx(least)
    assert found.cost_s == pytest.approx(_cost(problem, found.groups))
    assert found.lower_bound_s <= found.cost_s
    _require_partners(problem, found)


def _require_partners(problem: PlacementProblem, found: Placement) -> None:
    for seconds, (one, other) in zip(found.hops_s, pairwise(found.groups), strict=True):
        assert max(problem.hop_s[a, b] for a, b in zip(one, other, strict=True)) == seconds


@pytest.mark.parametrize("places", [8, 12])
def test_kinds_stay_together(places: int) -> None:
    """Groups keep the kinds that they begin with, tried out whole or not, however cheap another mix would be."""
    kinds = (0,) * (places // 2) + (1,) * (places // 2)
    apart = np.array([[1.0 if a == b else 0.1 for b in kinds] for a in kinds])
    found = place(PlacementProblem(apart, apart, 4, kinds), rounds=3)
    assert sorted(sorted({kinds[p] for p in group}) for group in found.groups) == [[0], [0], [1], [1]]
    assert sorted(p for group in found.groups for p in group) == list(range(places))


@pytest.mark.skipif(not CASES.exists(), reason=f"no {CASES.name} beside the checkout")
@pytest.mark.parametrize(
    "case", [1, 2, 3, pytest.param(0, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_published_placements_are_reached(case: int) -> None:
    """On 64 devices in up to 8 regions the cost is at most the published one, which has three decimals."""
    numbers = json.loads((REFERENCE / "seed_numbers.json").read_text())["dtfm_cost_s"]
    published = {row[0]: row[-1] for row in numbers["rows"]}[case]
    cases = np.load(CASES)
    problem = problem_of_links(
        cases[f"case{case}_delay_ms"] / 1e3, cases[f"case{case}_bandwidth_gbps"] / 8 * 1e9, 8,
        1.3e9 * 4 * 3 / 24, 2024 * 2048 * 2 * 61.035 / 2**30 * 1e9,
    )  # fmt: skip
    found = place(problem, rounds=5)
    assert found.lower_bound_s * (1 - 1e-9) <= found.cost_s <= published + 0.0005
