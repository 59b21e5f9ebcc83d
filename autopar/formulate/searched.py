"""Searches over the scenarios on some devices, and what came of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from time import monotonic

from autopar.engine.search import FURTHER, Answer, Scenario, is_large, search
from autopar.formulate.ahead import Ahead, may_fork
from autopar.formulate.kinds import kind_of
from autopar.formulate.pipelines.scenario import PipelineScenario
from autopar.formulate.record.assemble import Solved
from autopar.formulate.scenario import StageScenario
from autopar.formulate.space import AnyScenario


@dataclass(frozen=True)
class Searched:
    """The scenarios on so many devices, and what came of the search over them."""

    devices: int
    scenarios: tuple[AnyScenario, ...]
    answer: Answer[Solved]

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan; inf where there is none."""
        return self.answer.best.objective if self.answer.best else inf


def searched(
    scenarios: tuple[AnyScenario, ...],
    top: int,
    end_s: float = inf,
    below_s: float = inf,
    thorough: bool | None = None,
) -> Answer[Solved]:
    """Search scenarios for the `top` fastest plans of different kinds (`engine.search`)."""
    asked = [_as_engine_scenario(s) for s in scenarios]
    with Ahead(scenarios, asked) if is_large(len(asked), thorough) and may_fork() else nullcontext() as ahead:
        return search(
            asked,
            top=top,
            kind=kind_of if top > 1 else None,
            time_limit_s=None if end_s == inf else max(0.0, end_s - monotonic()),
            below=below_s,
            thorough=thorough,
            look=ahead.look if ahead else None,
        )


def _as_engine_scenario(scenario: AnyScenario) -> Scenario[Solved]:
    def solve(cutoff_s: float) -> tuple[float, Solved] | None:
        if isinstance(scenario, PipelineScenario):
            piped = scenario.solve(cutoff_s * FURTHER)
            return None if piped is None else (piped.step_time_s, piped)
        solved = scenario.solve(cutoff_s)
        return (solved.solution.objective_s, solved) if solved.solution.walks else None

    rough = (scenario.calls_bound_s, scenario.first_bound_s, scenario.run_bound_s)
    if isinstance(scenario, StageScenario):
        return Scenario(
            scenario.name, scenario.bound_s, solve, rough=rough, like=scenario.setting.num_microbatches,
            others=lambda cutoff_s: [(s.solution.objective_s, s) for s in scenario.families(cutoff_s)],
        )  # fmt: skip
    return Scenario(
        scenario.name, scenario.bound_s, solve, scenario.quick_bound_s(), rough, scenario.guess_s, scenario.alike
    )
