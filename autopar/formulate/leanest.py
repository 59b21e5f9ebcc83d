"""How little memory a space of plans can do with."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from autopar.formulate.scenario import StageScenario
from autopar.formulate.space import AnyScenario

LEANEST_BOUNDED, LEANEST_TRIED = 16, 4
"""Scenarios bounded, and of these solved, to say how much memory would do."""


def leanest(scenarios: Sequence[AnyScenario]) -> tuple[float, AnyScenario]:
    """A limit in bytes near the least under which there is a plan, and its scenario; inf where nothing is legal.

    The scenarios (one at least) must have been bounded roughly.
    """
    rough = sorted(scenarios, key=lambda s: s.least_bytes)[:LEANEST_BOUNDED]
    for scenario in rough:
        scenario.bound_s()
    tried = sorted(rough, key=lambda s: s.least_bytes)[:LEANEST_TRIED]
    least, place = min(((s.enough_bytes(), i) for i, s in enumerate(tried)), default=(inf, 0))
    return least, tried[place]


def tightest_stage(scenario: AnyScenario) -> str:
    """Which stage of the leanest plan of a pipeline needs most; nothing for one stage."""
    if isinstance(scenario, StageScenario):
        return ""
    return f" (stage {scenario.tightest()[1]} of {scenario.name} binds)"


def size_text(size_bytes: float) -> str:
    """Bytes in a unit, rounded up: what is written, given as a limit, is enough."""
    unit, name = (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{ceil(100 * size_bytes / unit) / 100:.2f} {name}"
