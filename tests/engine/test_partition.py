"""Partitions into stages against trying all of them."""

from __future__ import annotations

from itertools import combinations, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.engine.partition import bound_s, least_step_s, partitions
from autopar.engine.stack_problem import Floats


def _bound(loads: Floats, spans: Floats, cuts: tuple[int, ...]) -> float:
    most = 0.0
    for load, span in zip(loads, spans, strict=True):
        before = 0.0
        for i, (a, b) in enumerate(pairwise(cuts)):
            most = max(most, before + load[i, a, b])
            before += span[i, a, b]
    return most


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**32))
def test_all_partitions_in_order(ways: int, stages: int, units: int, seed: int) -> None:
    """Every partition comes once, the bounds are those of the definition and never fall."""
    rng = np.random.default_rng(seed)
    shape = (ways, stages, units + 1, units + 1)
    legal = np.triu(np.ones(shape[2:]), 1).astype(bool) & (rng.random(shape[1:]) < 0.8)
    spans: Floats = np.where(legal, rng.integers(0, 4, shape).astype(np.float64), np.inf)
    loads: Floats = spans + rng.integers(0, 9, shape).astype(np.float64)
    wanted = [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)] if stages <= units else []
    bounds = {cuts: b for cuts in wanted if np.isfinite(b := _bound(loads, spans, cuts))}
    found = list(partitions(loads, spans))
    assert {cuts: b for b, cuts in found} == bounds
    assert len(found) == len(bounds)
    assert [b for b, _ in found] == sorted(b for b, _ in found)
    least = min(bounds.values(), default=np.inf)
    found_s = bound_s(loads, spans, np.arange(units + 1)[None, :])
    assert found_s == least if ways == 1 else found_s <= least


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=8), st.integers(1, 30))
def test_total_alone_is_a_bound(seconds: list[float], count: int) -> None:
    """However the total is dealt out to the stages, a step is no less than what follows from the total."""
    before = np.cumsum([0.0, *seconds])
    step = max(s + count * t for s, t in zip(before, seconds, strict=False))
    assert step >= least_step_s(sum(seconds), count, len(seconds)) * (1 - 1e-9)


def test_total_is_reached() -> None:
    """Stages that shrink by 1 - 1/m reach the bound of the total."""
    seconds = [0.75**i for i in range(5)]
    before = np.cumsum([0.0, *seconds[:-1]])
    step = max(s + 4 * t for s, t in zip(before, seconds, strict=True))
    assert step == pytest.approx(least_step_s(sum(seconds), 4, 5))


def test_deep_chains_are_quick() -> None:
    """The first hundred of the partitions of 100 units into 16 stages are found without trying them all."""
    size = np.arange(101)[None, :] - np.arange(101)[:, None]
    span = np.where(size > 0, size * 1.0, np.inf)
    loads = np.broadcast_to(span * 32, (1, 16, 101, 101))
    found = list(islice(partitions(loads, np.broadcast_to(span, loads.shape)), 100))
    assert found[0][0] == found[-1][0] or found[0][0] < found[-1][0]
    assert len({cuts for _, cuts in found}) == 100
