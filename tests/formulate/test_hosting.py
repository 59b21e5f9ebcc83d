"""Where nothing fits on devices alone, plans keep something in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from autopar.errors import InfeasibleError
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.plan import PlanRecord
from tests.formulate.cases import planner


def _by_hand(maker: Planner, kinds: tuple[str, ...]) -> Iterator[PlanRecord]:
    """Uniform plans of one stage with a kind of offloading."""
    devices, batch = maker.cluster.devices, maker.request.global_batch
    for kind, tp, size, zero, recompute in product(kinds, {1, devices}, (1, 2, 4, 8), (0, 1), ("none", "full")):
        dp = devices // tp
        if size * dp <= batch and (dp > 1 or not zero) and (kind != "activations" or recompute == "none"):
            config = ManualConfig(dp=dp, tp=tp, microbatch_size=size, zero=zero, recompute=recompute, offload=kind)
            yield maker.estimate(config)


def _limited(maker: Planner, limit: int, *constraints: str) -> Planner:
    return replace(maker, request=replace(maker.request, memory_limit_bytes=limit, constraints=constraints))


@pytest.mark.parametrize(
    ("cluster", "share"), [("1xa100-80gb", 0.6), pytest.param("2xa100-80gb", 0.6, marks=pytest.mark.slow)]
)
def test_states_that_fit_nowhere_else(cluster: str, share: float) -> None:
    """Far below what any plan needs on devices alone the states go to the host, no slower than in any plan by hand;
    excluded, or below what even so is needed, there is none."""
    maker = planner("gpt", cluster, 8)
    limit = int(share * min(record.peak_tensor_bytes for record in _by_hand(maker, ("none",))))
    with pytest.raises(InfeasibleError):
        _limited(maker, limit, "exclude=offload").plan()
    with pytest.raises(InfeasibleError, match="memory is the binding limit"):
        _limited(maker, limit // 20).plan()
    with pytest.raises(InfeasibleError):  # what is asked for isn't what states on the host go with
        _limited(maker, limit, "zero=3", "recompute=full").plan()
    plan = _limited(maker, limit).plan()
    assert plan.peak_tensor_bytes <= limit
    assert {strategy.offload for stage in plan.stages for strategy in stage.strategies} == {"optimizer"}
    assert any("in the host's memory" in text for text in plan.assumptions)
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_time_s
    records = _by_hand(maker, ("optimizer", "activations"))
    fitting = [record.step_time_s for record in records if record.peak_tensor_bytes <= limit]
    assert fitting
    assert plan.step_time_s <= min(fitting) * (1 + 1e-9)
