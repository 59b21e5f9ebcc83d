"""Random models under random legal strategies on random meshes, emitted and run on real processes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.trace.capture import trace
from autopar.verify import verify
from tests.examples import examples
from tests.integration.random_models import LOSSES, STEPS, Recipe, example, random_plan
from tests.pool import Pool

RECIPES = st.builds(
    Recipe,
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4).map(tuple),
    st.integers(4, 7),
    st.integers(2, 6),
    st.sampled_from(sorted(LOSSES)),
)
MESHES = st.sampled_from([(2,), (3,), (4,), (2, 2)])
Case = tuple[Recipe, tuple[int, ...], int, int]
CASES = st.tuples(RECIPES, MESHES, st.integers(4, 7), st.integers(0, 999))


def check(case: Case) -> dict[str, Any]:
    """On a rank: trace, emit and verify."""
    recipe, sizes, batch, seed = case
    model, inputs = example(recipe)
    graph = trace(model, inputs)
    return verify(random_plan(graph, sizes, batch, seed), model, inputs, graph=graph, steps=1).to_json()


def differs(pool: Pool, case: Case) -> None:
    """Assert that a case equals the model on one device."""
    report = pool.run(prod(case[1]), check, case)[0]
    assert not report["missing_gradients"]
    assert max(report["loss_difference"], report["gradient"]["value"]) < 1e-9, report


@examples(6, derandomize=True)
@given(CASES)
def test_some_random_models_are_exact(pool: Pool, case: Case) -> None:
    """Loss and gradients are those of one device; uneven lengths, heads, widths and batches are among them."""
    differs(pool, case)


@pytest.mark.slow
@examples(150)
@given(CASES)
def test_random_models_are_exact(pool: Pool, case: Case) -> None:
    """As above, of many."""
    differs(pool, case)
