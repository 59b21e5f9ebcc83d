"""What is looked at next to the best plans: meshes of three axes, ZeRO inside nodes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from autopar.cluster import Link
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.config import ManualConfig
from autopar.formulate.finer import WORTH, refined, sent_shares
from autopar.formulate.mesh import finer_sizes
from autopar.formulate.planner import Planner
from autopar.formulate.searched import Searched, searched
from autopar.formulate.space import Space
from autopar.report.strategy import strategy_words
from tests.formulate.cases import cluster_of, planner
from tests.integration.strategies import planner_of

DEVICES, LIMIT_BYTES = 8, 200 << 20


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
    further = finer.scenarios[len(found.scenarios) :]
    each = [s.solve().solution.objective_s for s in further]  # type: ignore[union-attr]
    assert finer.answer.lower_bound <= min(each) * (1 + 1e-9)
    assert finer.best_s == pytest.approx(min(each))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("two experts", "batch 2 ways, tensor+sequence 2 ways, tensor+experts+sequence 2 ways, ZeRO-1"),
        ("long, two heads", "batch 2 ways, sequence 2 ways, tensor+sequence 2 ways, ZeRO-1"),
    ],
)
def test_words_of_three_axes(model: str, words: str) -> None:
    """A plan says what each axis splits: samples, experts and their width; samples, tokens, and columns or rows."""
    record = planner_of(model, DEVICES, 2).plan()
    assert words in [strategy_words(s, record.stages[0].mesh) for s in record.stages[0].strategies]


def test_none_where_layers_hardly_talk() -> None:
    """Where replicas alone are best nothing is changed in layers, and no further mesh is looked at."""
    maker = planner("mlp", "8xa100-80gb", 1 << 15)
    found = two_axes(maker.space)
    assert found.answer.best is not None
    assert sent_shares(found.answer.best, maker.pricer)[0] < WORTH
    assert refined(found, maker.space).scenarios == found.scenarios


def slow_nodes(bytes_per_s: float) -> Planner:
    """Two nodes of two devices that the gpt fits on if it is dealt over two of them; replicas alone."""
    made = planner("gpt", "2x2xa100-80gb", 16, LIMIT_BYTES, ("exclude=pp", "exclude=tp", "devices=4"))
    cluster = replace(made.cluster, inter=Link("slow", bytes_per_s, 1e-5))
    return replace(made, cluster=cluster, pricer=RooflinePricer(cluster))


def grid(maker: Planner, group: str) -> float:
    """Seconds of the best of all uniform configurations whose ZeRO shards over such groups."""
    texts = [
        f"dp=4,zero={zero},zero_group={group},recompute={recompute},microbatch_size=4"
        for zero in (1, 2, 3) for recompute in ("none", "full")
    ]  # fmt: skip
    found = [maker.estimate(ManualConfig.parse(text)) for text in texts]
    return min(one.step_time_s for one in found if one.feasible)


@pytest.mark.parametrize(("bytes_per_s", "group"), [(1e9, 2), (2e10, 0)])
def test_zero_inside_nodes_where_the_network_is_slow(bytes_per_s: float, group: int) -> None:
    """ZeRO shards inside nodes just where that is the faster of all uniform plans, and the plan is no slower."""
    maker = slow_nodes(bytes_per_s)
    inside, across = grid(maker, "node"), grid(maker, "all")
    assert (inside < across) == (group == 2)
    plan = maker.plan()
    assert {s.zero_group for s in plan.stages[0].strategies if s.zero} == {group}
    assert plan.step_time_s <= min(inside, across) * (1 + 1e-9)
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_time_s
