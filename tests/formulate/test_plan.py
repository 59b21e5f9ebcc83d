"""What a plan says of itself against its strategies priced one by one, and against plans written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost.pricer import CollectiveTimes
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.chains.figures import layer_figures
from autopar.formulate.config import ManualConfig
from autopar.formulate.layers.tables import Setting
from autopar.formulate.planner import Planner
from autopar.formulate.scenario import StageScenario
from autopar.graph import CollectiveKey
from autopar.plan import POLICIES, PlanRecord
from tests.formulate.cases import cluster_of, planner, traced
from tests.formulate.plans import (
    BATCHES,
    ONE_STAGE,
    divisors,
    estimate_of,
    estimates_of,
    plan_of,
    runs_of,
    strategies_of,
)

LLAMA = pytest.param("llama", 0.65, marks=pytest.mark.slow)
SHARED = [("mlp", 1.0), ("mlp", 0.65), ("gpt", 1.0), ("gpt", 0.65), ("tied", 0.65), LLAMA]
"""Models with memory limits as shares of what the unlimited plan holds."""


def limited(model: str, share: float, cluster: str = "2xa100-80gb") -> PlanRecord:
    """The plan under a share of the memory that the unlimited plan holds."""
    return plan_of(model, cluster, int(plan_of(model, cluster).peak_tensor_bytes * share))


@pytest.mark.parametrize(("model", "share"), SHARED)
def test_adds_up(model: str, share: float) -> None:
    """Seconds and peak bytes are those of the layers' own figures, added up by the definition in docs/design.md."""
    record = limited(model, share)
    setting = Setting(record.stages[0].mesh, record.global_microbatch, record.num_microbatches)
    pricer, strategies = RooflinePricer(cluster_of("2xa100-80gb")), strategies_of(record)
    layers = []
    for r, run in enumerate(runs_of(model)):
        for strategy in strategies[run.first_layer : run.first_layer + run.count]:
            layers.append((r, layer_figures(run, strategy, setting, pricer, POLICIES["bf16"], "adamw")))
    m = record.num_microbatches
    assert record.step_time_s == pytest.approx(sum(m * f.micro_s + f.step_s for _, f in layers), rel=1e-9)
    memory = [(r, f.memory) for r, f in layers]
    always = sum(x.parameters + x.optimizer + x.inputs for _, x in memory)
    peaks = [
        always + sum(x.gradients for _, x in memory) + max(x.step for _, x in memory),
        always + sum(x.reduced + x.update for _, x in memory),
    ]
    for moment in range(len(runs_of(model))):
        held = always + sum(x.gradients for r, x in memory if m > 1 or r > moment)
        held += sum(x.saved for r, x in memory if r < moment)
        own = [x for r, x in memory if r == moment]
        if m > 1:
            peaks.append(held + sum(x.saved for x in own) + max(x.transient for x in own))
        else:  # layer by layer gradients take the place of what is saved; one layer has both
            most = max(x.transient + min(x.saved, x.gradients) for x in own)
            peaks.append(held + sum(max(x.saved, x.gradients) for x in own) + most)
    assert record.peak_tensor_bytes == max(peaks)
    assert record.peak_memory_bytes == sum(record.memory_by_category.values())


@pytest.mark.parametrize(("model", "share"), SHARED)
def test_no_uniform_configuration_is_faster(model: str, share: float) -> None:
    """The plan is at least as fast as any configuration of one (dp, tp, sp, zero, recompute, size) that fits."""
    record = limited(model, share)
    limit = record.request.memory_limit_bytes or 0
    fitting = [e.step_time_s for e in estimates_of(model, "2xa100-80gb") if e.peak_tensor_bytes <= limit]
    assert record.step_time_s <= min(fitting, default=float("inf")) * (1 + 1e-9)
    assert record.lower_bound_s is not None
    assert record.lower_bound_s <= record.step_time_s


def test_two_axes_beat_every_configuration() -> None:
    """On four devices the plan is at least as fast as any uniform configuration over two axes."""
    fastest = min(e.step_time_s for e in estimates_of("mlp", "4xa100-80gb"))
    assert plan_of("mlp", "4xa100-80gb").step_time_s <= fastest * (1 + 1e-9)


@pytest.mark.parametrize(("model", "share"), [("mlp", 0.65), ("gpt", None), LLAMA])
def test_bounds_hold(model: str, share: float | None) -> None:
    """In no scenario is a plan found that is faster than the scenario's bounds or holds less than its least bytes."""
    free = plan_of(model)
    limit = None if share is None else int(free.peak_tensor_bytes * share)
    maker = planner(model, batch=BATCHES.get(model, 8), limit_bytes=limit, constraints=ONE_STAGE)
    for scenario in maker.space.searched(2, limit):
        assert isinstance(scenario, StageScenario)
        bound = max(scenario.first_bound_s(), scenario.bound_s())
        solution = scenario.solve().solution
        if solution.walks:
            assert bound <= solution.objective_s * (1 + 1e-9)
        if solution.peak_bytes is not None:
            assert scenario.least_bytes <= solution.peak_bytes


@pytest.mark.parametrize("text", ["dp=2,zero=3,recompute=full", "tp=2,sp=1,microbatch_size=2"])
def test_configured_plan_is_its_estimate(text: str) -> None:
    """`plan(config=...)` and `estimate` predict the same; only the plan has a lower bound."""
    made, estimate = planner("gpt").plan(ManualConfig.parse(text)), estimate_of("gpt", "2xa100-80gb", text)
    assert made.step_time_s == estimate.step_time_s
    assert made.peak_tensor_bytes == estimate.peak_tensor_bytes
    assert estimate.lower_bound_s is None


def test_same_request_same_plan() -> None:
    """Planning anew gives the same JSON but for the seconds it took."""
    limit = limited("gpt", 0.65).request.memory_limit_bytes
    again = planner("gpt", limit_bytes=limit, constraints=ONE_STAGE).plan()
    first, second = (replace(r, trace_s=0.0, search_s=0.0).to_json() for r in (limited("gpt", 0.65), again))
    assert first == second


def test_alternatives_are_other_plans_in_order() -> None:
    """`top` gives that many plans, the fastest first, no two alike."""
    record = planner("mlp", batch=64, constraints=ONE_STAGE).plan(top=3)
    plans = [record, *record.alternatives]
    assert len(plans) == 3
    assert [p.step_time_s for p in plans] == sorted(p.step_time_s for p in plans)
    assert len({(p.stages, p.num_microbatches) for p in plans}) == 3


def test_microbatches_divide_the_batch() -> None:
    """Every scenario splits the global batch into equal microbatches, and every divisor is looked at."""
    scenarios = planner("gpt", constraints=ONE_STAGE).space.searched(2, None)
    counts = {s.setting.num_microbatches for s in scenarios if isinstance(s, StageScenario)}
    assert counts == set(divisors(8))


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_record_covers_the_model(model: str) -> None:
    """Every layer has a strategy, tokens are those of the batch, the parameters those of the model."""
    record, graph = plan_of(model), traced(model)
    assert len(strategies_of(record)) == len(graph.layers) == len(record.layer_names)
    if graph.token_dim is not None:
        assert record.tokens_per_s == pytest.approx(8 * graph.token_dim.at(1) / record.step_time_s)
    assert record.num_microbatches * record.global_microbatch == record.request.global_batch
    assert sum(record.cost_sources.values()) == pytest.approx(1.0)
    assert sum(record.time_by_kind_s.values()) == pytest.approx(record.step_time_s)


class BentSums(RooflinePricer):
    """Sums over ranks are cheap for the gradients of a layer and dear for those of the model; all else is dearer."""

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Those of the roofline, times as much."""
        found = super().collectives(keys)
        times = [4.0 if key.kind != "all_reduce" else 10.0 if key.bytes > 3e7 else 0.5 for key in keys]
        return replace(found, seconds=found.seconds * np.array(times))


def test_levels_of_zero_are_compared_by_what_they_take() -> None:
    """ZeRO 0 is fastest for each layer though not by the slope at the model's size, and the search takes it."""
    usual = planner("gpt", constraints=("dp=2",))
    maker = Planner(usual.graph, usual.cluster, BentSums(usual.cluster), usual.request)
    each = [maker.estimate(ManualConfig(dp=2, microbatch_size=4, zero=zero)).step_time_s for zero in range(4)]
    assert min(each) == each[0]
    assert maker.plan().step_time_s <= each[0] * (1 + 1e-9)
