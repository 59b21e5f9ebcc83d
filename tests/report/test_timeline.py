"""The timeline of a step."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.plan import CarriedCosts, LayerCost, PlanRecord
from autopar.report.timeline import chrome_trace, step_events, write_timeline
from tests.report.test_explain import record

PASSES = {
    "forward": 0.01, "backward": 0.02, "recompute": 0.005, "forward communication": 0.001,
    "backward communication": 0.002,
}  # fmt: skip
STEP = {"compute": 0.0, "communication": 0.003, "optimizer": 0.004}


def costed(microbatches: int = 4) -> PlanRecord:
    """The plan of six layers: two ends and four in the middle."""
    costs = tuple(LayerCost(0, run, count, PASSES, STEP, {}) for run, count in enumerate((1, 4, 1)))
    kinds = {"compute": 6 * microbatches * 0.03, "recompute": 6 * microbatches * 0.005, "optimizer": 6 * 0.004,
             "communication": 6 * (microbatches * 0.003 + 0.003)}  # fmt: skip
    return record(costs=CarriedCosts(costs), num_microbatches=microbatches, time_by_kind_s=kinds,
                  step_time_s=sum(kinds.values()))  # fmt: skip


def test_seconds_by_kind_are_those_of_the_plan() -> None:
    """Events add up to the plan's seconds of each kind, and the last one ends with the step."""
    plan = costed()
    events = step_events(plan)
    total: dict[str, float] = defaultdict(float)
    for event in events:
        total[event.kind] += event.duration_s
    assert total["forward"] + total["backward"] == pytest.approx(plan.time_by_kind_s["compute"])
    assert total["recompute"] == pytest.approx(plan.time_by_kind_s["recompute"])
    assert total["optimizer"] == pytest.approx(plan.time_by_kind_s["optimizer"])
    sent = total["forward communication"] + total["backward communication"] + total["communication"]
    assert sent == pytest.approx(plan.time_by_kind_s["communication"])
    assert max(e.start_s + e.duration_s for e in events) == pytest.approx(plan.step_time_s)


def test_events_follow_each_other() -> None:
    """On one stage nothing runs beside anything else; the backward takes the layers in reverse."""
    events = step_events(costed(2))
    for event, then in pairwise(events):
        assert event.start_s + event.duration_s == pytest.approx(then.start_s)
    first = [e.name for e in events if e.microbatch == 0 and e.kind in ("forward", "backward")]
    assert first == [
        "forward wte", "forward h.0 to h.3 (4 layers)", "forward head",
        "backward head", "backward h.0 to h.3 (4 layers)", "backward wte",
    ]  # fmt: skip


def test_file_is_a_chrome_trace(tmp_path: Path) -> None:
    """Every event has what the format wants; stages and lanes have names; times are microseconds."""
    plan = costed()
    write_timeline(plan, tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text())
    assert data == chrome_trace(step_events(plan), ["stage 0: devices 0-7"])
    complete = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= set(e) for e in complete)
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(plan.step_time_s * 1e6)
    named = {(e["pid"], e.get("tid")) for e in data["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} <= named


def test_plan_without_costs() -> None:
    """A plan that carries no costs has no timeline, and says so."""
    with pytest.raises(PlanError, match="make it anew"):
        step_events(replace(costed(), costs=CarriedCosts()))
