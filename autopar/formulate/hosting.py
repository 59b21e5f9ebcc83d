"""Plans that keep something in the host's memory, looked for where nothing fits without.

What stays on the device while the optimizer's states are on the host is what parameters in the dtype of computation and
an optimizer without states leave there: so that is searched, and what is found priced as it will run. Of activations
that are offloaded next to nothing stays: scenarios without recomputation are chosen without a limit, and looked at
again with their activations on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

from autopar.errors import ConfigError
from autopar.formulate.pipelines.scenario import PipelineScenario, SolvedPipeline
from autopar.formulate.record.assemble import Solved
from autopar.formulate.record.rewritten import with_offload
from autopar.formulate.scenario import StageScenario
from autopar.formulate.searched import searched
from autopar.formulate.space import AnyScenario, Space

PLANS_TRIED = 4
"""Plans of different kinds that are priced with their optimizer's states on the host."""
SCENARIOS_TRIED = 24
"""Scenarios that are tried with their activations on the host, the most promising first."""


@dataclass(frozen=True)
class Hosted:
    """A plan with something on the host, which fits or not, and seconds that none of its kind can beat."""

    solved: Solved
    bound_s: float


def hosted(space: Space, limit_bytes: int, end_s: float = inf) -> Iterator[Hosted]:
    """Plans on all devices (or as many as are pinned) with the optimizer's states or activations on the host."""
    excluded = any((c.key, c.value) == ("exclude", "offload") for c in space.constraints)
    if excluded or space.cluster.device.backend == "cpu":  # whose memory is the host's
        return
    devices = space.pinned_devices or space.request.devices
    yield from _optimizer(space, devices, limit_bytes, end_s)
    yield from _activations(space, devices, end_s)


def _optimizer(space: Space, devices: int, limit_bytes: int, end_s: float) -> Iterator[Hosted]:
    """Each rank's host steps its share of the parameters (ZeRO 1), or where that can't be all of them."""
    request = space.request
    policy = replace(request.policy, parameters=request.policy.compute)
    for zero in _levels(space):
        left = replace(request, policy=policy, optimizer="sgd", constraints=(*request.constraints, f"zero={zero}"))
        scenarios = _scenarios(replace(space, request=left), devices, limit_bytes)
        answer = searched(scenarios, PLANS_TRIED, end_s)
        for found in (answer.best, *answer.alternatives):
            if found is not None:
                solved, scenario = found.payload, _origin(found.payload, scenarios)
                moved = with_offload(solved, scenario, "optimizer", request.policy, request.optimizer)
                yield Hosted(moved, answer.lower_bound)
        if answer.best:
            return


def _levels(space: Space) -> tuple[int, ...]:
    """The ZeRO levels that constraints allow of those that go with states on the host, the better first."""
    if any((c.key, c.value) == ("exclude", "zero") for c in space.constraints):
        return (0,)
    asked = [int(c.value) for c in space.constraints if c.key == "zero" and not c.pattern]
    return tuple(level for level in (1, 0) if not asked or level in asked)


def _activations(space: Space, devices: int, end_s: float) -> Iterator[Hosted]:
    """Plans of one stage without recomputation; none where that is asked for."""
    if any(c.key == "recompute" and c.value != "none" for c in space.constraints):
        return
    request = replace(space.request, constraints=(*space.request.constraints, "exclude=recompute", "pp=1"))
    scenarios = [s for s in _scenarios(replace(space, request=request), devices, None) if isinstance(s, StageScenario)]
    bounds = {id(scenario): scenario.calls_bound_s() for scenario in scenarios}
    for scenario in sorted(scenarios, key=lambda s: bounds[id(s)])[:SCENARIOS_TRIED]:
        if monotonic() > end_s:
            return
        solved = scenario.solve() if bounds[id(scenario)] < inf else None
        if solved and solved.solution.walks:
            moved = with_offload(solved, scenario, "activations", request.policy, request.optimizer)
            yield Hosted(moved, min(bounds.values()))


def _scenarios(space: Space, devices: int, limit_bytes: int | None) -> tuple[AnyScenario, ...]:
    """The scenarios; none where what is asked for contradicts the constraints."""
    try:
        return tuple(space.searched(devices, limit_bytes))
    except ConfigError:
        return ()


def _origin(solved: Solved, scenarios: tuple[AnyScenario, ...]) -> AnyScenario:
    """A scenario that has the layers and the meshes of a solution."""
    if isinstance(solved, SolvedPipeline):
        piped = (s for s in scenarios if isinstance(s, PipelineScenario))
        return next(s for s in piped if (s.shape, s.ground, s.book.chains.setting) == _place(solved))
    staged = (s for s in scenarios if isinstance(s, StageScenario))
    return next(s for s in staged if s.setting == solved.setting)


def _place(solved: SolvedPipeline) -> tuple[object, ...]:
    return solved.shape, solved.ground, solved.setting
