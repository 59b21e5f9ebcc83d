"""Memory limits: obeyed, costly, and named when nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from autopar.choices import parse_bytes
from autopar.cost.roofline import RooflinePricer
from autopar.errors import ConfigError, InfeasibleError
from autopar.formulate.chains.dual import Dual
from autopar.formulate.config import ManualConfig
from autopar.formulate.layers.ladder import ONLY_BYTES
from tests.formulate.cases import planner
from tests.formulate.plans import BATCHES, ONE_STAGE, plan_of

MODELS = ["mlp", "gpt"]
LADDER = (1.0, 0.8, 0.65)


@pytest.mark.parametrize("model", MODELS)
def test_less_memory_is_never_faster(model: str) -> None:
    """As the limit shrinks, plans hold at most the limit and get slower."""
    free = plan_of(model)
    plans = [free]
    for share in LADDER:
        limit = int(free.peak_tensor_bytes * share)
        plans.append(plan_of(model, "2xa100-80gb", limit))
        assert plans[-1].peak_tensor_bytes <= limit
        assert plans[-1].feasible
    assert len(plans) == 1 + len(LADDER)
    assert all(a.step_time_s <= b.step_time_s * (1 + 1e-9) for a, b in pairwise(plans))
    assert plans[-1].step_time_s > free.step_time_s


def test_no_limit_is_above_the_memory_there_is() -> None:
    """A plan that needs more than the device has doesn't fit, however high the limit that is asked for."""
    small = planner("mlp", limit_bytes=1 << 50, constraints=("exclude=offload",))
    device = replace(small.cluster.device, usable_bytes=10 << 20, reserve_bytes=0)
    where = replace(small.cluster, device=device)
    small = replace(small, cluster=where, pricer=RooflinePricer(where))
    assert not small.estimate(ManualConfig(dp=2)).feasible
    with pytest.raises(InfeasibleError, match=r"the limit is 10\.00 MiB"):
        small.plan()


def test_no_price_where_nothing_is_legal() -> None:
    """Bytes have finite prices: none but 0 where no plan is legal or without a limit, so that time without end makes
    no price."""
    for limit, seconds, prices in ((1e9, inf, 1), (None, 1.0, 1), (1e9, 1.0, 3)):
        dual = Dual(limit, (1,), False)
        for price in dual.asked():
            dual.note(price, 1e6 if price[0] == ONLY_BYTES else seconds, 1e6, 0.0)
        assert dual.asked() == []
        assert dual.fine()[0] == 0.0
        assert len(dual.fine()) == prices


def test_too_little_time_is_not_called_impossible() -> None:
    """A search that is over before it has a plan says that time was too short, not that nothing fits."""
    with pytest.raises(ConfigError, match="within the time limit of 0 s"):
        planner("mlp", limit_bytes=10 << 20).plan(time_limit_s=0)


def test_a_degree_must_divide_the_devices() -> None:
    """Three data-parallel ways of two devices are refused, not rounded."""
    with pytest.raises(InfeasibleError, match="dp=3"):
        planner("mlp", constraints=("dp=3",)).plan()


@pytest.mark.parametrize("model", MODELS)
def test_infeasible_names_a_limit_that_works(model: str) -> None:
    """With too little memory the error names memory, the limit and a size that does when given as the limit."""
    too_little = 10 << 20
    with pytest.raises(InfeasibleError) as caught:
        planner(
            model, batch=BATCHES.get(model, 8), limit_bytes=too_little, constraints=(*ONE_STAGE, "exclude=offload")
        ).plan()
    text = str(caught.value)
    assert "memory" in text
    assert "the limit is 10.00 MiB" in text
    found = re.search(r"a memory limit of ([\d.]+ \w+)", text)
    assert found is not None, text
    enough = parse_bytes(found.group(1))
    assert enough is not None
    assert plan_of(model, "2xa100-80gb", enough).peak_tensor_bytes <= enough
