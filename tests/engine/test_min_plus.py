"""Cheapest ways against trying every sequence of states."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.engine.min_plus import cheapest_ways
from tests.examples import examples


@examples(40)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 3), min_size=1, max_size=2), st.integers(1, 3))
def test_cheapest_ways_under_many_weightings(seed: int, counts: list[int], states: int) -> None:
    """Under each weighting the total is the least over all sequences of states, and the way told costs just that."""
    rng = np.random.default_rng(seed)
    leads = [(2, 3) if rng.random() < 0.5 else (2, 1) for _ in counts]
    matrices = [np.where(rng.random(s := (*lead, states, states)) < 0.2, np.inf, rng.random(s)) for lead in leads]
    ends = rng.random((2, states))
    found = cheapest_ways(counts, matrices, *ends)
    lead = np.broadcast_shapes(*leads)
    for place in np.ndindex(lead):
        steps = [np.broadcast_to(m, (*lead, states, states))[place] for m, n in zip(matrices, counts, strict=True)]
        layers = [step for step, n in zip(steps, counts, strict=True) for _ in range(n)]
        costs = [
            ends[0, way[0]] + sum(c[a, b] for c, (a, b) in zip(layers, pairwise(way), strict=True)) + ends[1, way[-1]]
            for way in product(range(states), repeat=len(layers) + 1)
        ]
        total = np.broadcast_to(found.totals, lead)[place]
        np.testing.assert_allclose(total, min(costs))
        if np.isfinite(total):
            way = found.way(place)
            assert [sum(taken.values()) for taken in way.steps] == counts
            told = sum(steps[r][step] * n for r, taken in enumerate(way.steps) for step, n in taken.items())
            assert total - told <= max(ends[0]) + max(ends[1]) + 1e-9
            assert told <= total - min(ends[0]) - min(ends[1]) + 1e-9
