"""Alternatives that are other kinds of plans."""

from __future__ import annotations

from collections import Counter

from autopar.plan import PlanRecord
from autopar.report.strategy import most_common
from tests.formulate.cases import planner


def kind(record: PlanRecord) -> tuple[object, ...]:
    """Pipeline, and in words what most layers do, read from the record."""
    return (record.pp_degree, record.schedule if record.pp_degree > 1 else "", len(record.stages), most_common(record))


def test_alternatives_differ_in_kind() -> None:
    """Of four plans no two are of one kind; the first is the one found without alternatives, the rest are slower."""
    best, found = planner("gpt").plan(), planner("gpt").plan(top=4)
    plans = [found, *found.alternatives]
    assert len(plans) == 4
    assert Counter(map(kind, plans)).most_common(1)[0][1] == 1
    assert found.step_time_s == best.step_time_s
    assert [p.step_time_s for p in plans] == sorted(p.step_time_s for p in plans)


def test_one_stage_has_alternatives_by_zero_and_recomputation() -> None:
    """On one stage, too, there are several kinds, each within the limit."""
    found = planner("gpt", constraints=("pp=1",)).plan(top=3)
    assert len({kind(p) for p in (found, *found.alternatives)}) == 3
    assert all(p.feasible and p.pp_degree == 1 for p in found.alternatives)
