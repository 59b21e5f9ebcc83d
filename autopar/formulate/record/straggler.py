"""A plan in which one device is slower than the others, which wait for it."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from autopar.errors import ConfigError
from autopar.formulate.chains.columns import Column
from autopar.formulate.pipelines.book import GroupPlan, StagePart
from autopar.formulate.pipelines.piped import run
from autopar.formulate.pipelines.scenario import SolvedPipeline
from autopar.formulate.record.assemble import Solved
from autopar.formulate.scenario import SolvedScenario


def with_straggler(solved: Solved, factor: float) -> Solved:
    """One device of the stages that work longest takes `factor` times as long for all but what it sends.

    Raises ConfigError for factors below 1.
    """
    if not (isfinite(factor) and factor >= 1):
        raise ConfigError(f"straggler={factor}: give how many times as long a device takes, 1 or more")
    if isinstance(solved, SolvedScenario):
        return replace(solved, columns=tuple(tuple(_slowed(c, factor) for c in own) for own in solved.columns))
    return _in_pipeline(solved, factor)


def _in_pipeline(solved: SolvedPipeline, factor: float) -> SolvedPipeline:
    busiest = solved.time.simulation.busiest
    groups = tuple(_slowed_group(g, factor) if i == busiest else g for i, g in enumerate(solved.groups))
    found = replace(solved, groups=groups)
    seconds = [stage.seconds for stage in found.stages]
    return replace(found, time=run(solved.shape, seconds, solved.between, solved.ground))


def _slowed_group(group: GroupPlan, factor: float) -> GroupPlan:
    return replace(group, chunks=tuple(_slowed_stage(chunk, factor) for chunk in group.chunks))


def _slowed_stage(stage: StagePart, factor: float) -> StagePart:
    return replace(stage, parts=tuple(replace(p, column=_slowed(p.column, factor)) for p in stage.parts))


def _slowed(column: Column, factor: float) -> Column:
    return replace(column, figures=column.figures.slowed(factor))
