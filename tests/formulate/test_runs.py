"""Depth costs nothing, and parameters shared between layers are kept in one way."""

from __future__ import annotations

from collections import defaultdict

import pytest

from autopar.formulate.scenario import StageScenario
from tests.formulate.cases import planner, traced
from tests.formulate.plans import ONE_STAGE, plan_of, programs_of, runs_of, strategies_of


@pytest.mark.parametrize(("short", "deep"), [("gpt", "gpt-40"), ("tied", "tied-20")])
def test_depth_adds_no_choices(short: str, deep: str) -> None:
    """Models of few and of many blocks have equally many runs, and as many choices but for one that parameters, which
    are synchronised together, may make worth a look; only the counts differ."""
    sizes = []
    for model in (short, deep):
        (scenario, *_) = planner(model, constraints=ONE_STAGE).space.searched(2, 1 << 33)
        assert isinstance(scenario, StageScenario)
        solved = scenario.solve()
        sizes.append([len(columns) for columns in solved.columns])
        assert [run.count for run in runs_of(model)][1] == len(traced(model).layers) - 2
    assert len(sizes[0]) == len(sizes[1])
    assert all(abs(few - many) <= 1 for few, many in zip(*sizes, strict=True))


def test_tied_parameters_are_kept_in_one_way() -> None:
    """All layers that use a parameter store it in one layout, at one ZeRO level over the same axes."""
    model = "tied"
    record = plan_of(model, "2xa100-80gb", int(plan_of(model).peak_tensor_bytes * 0.65))
    graph, found = traced(model), defaultdict(set)
    layers = zip(graph.layers, graph.cuts, strategies_of(record), programs_of(record, model), strict=False)
    for layer, cut, strategy, program in layers:
        axes = strategy.data_axes(graph.values[cut.main].batch_dim) if strategy.zero else ()
        for name, local in zip(layer.params, graph.classes[layer.class_index].params, strict=True):
            found[name].add((program.layouts[local], strategy.zero, axes))
    shared = [name for name in found if sum(name in layer.params for layer in graph.layers) > 1]
    assert shared == ["embed.weight"]
    assert all(len(found[name]) == 1 for name in shared)
