"""Hand-written plans on devices of which one is slower."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig
from autopar.plan import PlanRecord
from tests.formulate.cases import planner

KINDS = ("compute", "recompute", "optimizer")


def estimate(text: str, straggler: float) -> PlanRecord:
    return planner("gpt", "4xa100-80gb", 16).estimate(ManualConfig.parse(text), straggler)


@pytest.mark.parametrize("text", ["dp=4,microbatch_size=4,recompute=full", "tp=4,zero=1,microbatch_size=8"])
def test_all_wait_for_the_slow_device(text: str) -> None:
    """In one stage all but communication takes as many times as long; bytes are what they were."""
    usual, slow = estimate(text, 1.0), estimate(text, 1.5)
    for kind, seconds in usual.time_by_kind_s.items():
        assert slow.time_by_kind_s[kind] == pytest.approx(seconds * (1.5 if kind in KINDS else 1.0))
    assert slow.step_time_s == pytest.approx(sum(slow.time_by_kind_s.values()))
    assert slow.memory_by_category == usual.memory_by_category
    assert any("1.5 times" in said for said in slow.assumptions)


def test_a_pipeline_is_as_fast_as_its_slow_stage() -> None:
    """With many microbatches a step takes at least the slow stage's own work, and no more than if all were slow."""
    usual, slow = (estimate("pp=4,microbatch_size=1", f) for f in (1.0, 2.0))
    busy = usual.step_time_s - usual.bubble_s - usual.exposed_comm_s
    assert 2 * busy <= slow.step_time_s <= 2 * usual.step_time_s


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), -1.0])
def test_no_device_is_faster_than_it_is(factor: float) -> None:
    """Factors that make nothing slower are refused by value."""
    with pytest.raises(ConfigError, match=f"straggler={factor}"):
        estimate("dp=4,microbatch_size=4", factor)
