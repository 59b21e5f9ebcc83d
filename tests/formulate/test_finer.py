"""Meshes of three axes, looked at next to the best of two."""

from __future__ import annotations

from math import prod

import pytest

from autopar.formulate.finer import WORTH, refined, relaid_share
from autopar.formulate.mesh import finer_sizes
from autopar.formulate.planner import Planner
from autopar.formulate.searched import Searched, searched
from autopar.formulate.space import Space
from tests.formulate.cases import cluster_of, planner
from tests.integration.strategies import planner_of

DEVICES = 8


def two_axes(space: Space) -> Searched:
    """What is found on meshes of up to two axes, without a limit."""
    scenarios = tuple(space.searched(space.request.devices, None))
    return Searched(space.request.devices, scenarios, searched(scenarios, 1))


@pytest.mark.parametrize(("sizes", "pinned"), [((4, 8), False), ((12, 2), True), ((6,), False), ((2, 4, 2), True)])
def test_neighbours(sizes: tuple[int, ...], pinned: bool) -> None:
    """They are just those factorisations into three, the free axes longer than 1, that a factor moved makes of one."""
    cluster = cluster_of("16x8xh100-80gb")
    starts = [(*(1,) * (3 - len(sizes)), *sizes)] if len(sizes) == 3 or not pinned else []
    starts += [(sizes[0], 1, sizes[1])] if len(sizes) == 2 else []
    found = set(finer_sizes(sizes, pinned, cluster))
    whole = prod(sizes)
    every = [(a, b, whole // a // b) for a in range(1, whole + 1) for b in range(1, whole + 1) if whole % (a * b) == 0]

    def next_to(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        changed = sorted(max(a, b) / min(a, b) for a, b in zip(one, other, strict=True) if a != b)
        return len(changed) == 2 and changed[0] == changed[1] and changed[0] in (2, 3)

    near = {e for e in every if min(e[1:]) > 1 and any(next_to(e, start) for start in starts)}
    assert {(a, *sorted((b, c))) for a, b, c in near} == {(a, *sorted((b, c))) for a, b, c in found}
    assert len(found) == len({(a, *sorted((b, c))) if 8 % (b * c) == 0 else (a, b, c) for a, b, c in near})


def test_bound_is_that_of_all_scenarios() -> None:
    """Experts over three axes are faster than over two, and no scenario that was looked at is below the bound."""
    maker = planner_of("two experts", DEVICES, 2)
    found = two_axes(maker.space)
    finer = refined(found, maker.space)
    assert finer.best_s < found.best_s
    assert len(finer.answer.bounds) == len(finer.scenarios) > len(found.scenarios)
    each = [s.solve().solution.objective_s for s in finer.scenarios]  # type: ignore[union-attr]
    assert finer.answer.lower_bound <= min(each) * (1 + 1e-9)
    assert finer.best_s == pytest.approx(min(each))


def test_none_where_layers_hardly_talk() -> None:
    """Where replicas alone are best nothing is changed in layers, and no further mesh is looked at."""
    maker: Planner = planner("mlp", "8xa100-80gb", 1 << 15)
    found = two_axes(maker.space)
    assert found.answer.best is not None
    assert relaid_share(found.answer.best, maker.pricer) < WORTH
    assert refined(found, maker.space) is found
