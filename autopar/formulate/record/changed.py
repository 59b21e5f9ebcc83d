"""A solution whose layers cost something else than what it was chosen by: the choices stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from autopar.formulate.chains.columns import Column
from autopar.formulate.pipelines.book import GroupPlan, StagePart
from autopar.formulate.pipelines.piped import run
from autopar.formulate.pipelines.scenario import SolvedPipeline
from autopar.formulate.record.assemble import Solved
from autopar.formulate.scenario import SolvedScenario

Change: TypeAlias = Callable[[int, int, Column], Column]
"""What a column becomes: of a group of devices (0 where there is one), of a run of layers."""


def changed(solved: Solved, change: Change) -> Solved:
    """`solved` with every column that it uses changed, and its seconds counted anew."""
    if isinstance(solved, SolvedScenario):
        used = {(r, index) for r, walk in enumerate(solved.solution.walks) for index, _ in walk}
        columns = tuple(
            tuple(change(0, r, column) if (r, i) in used else column for i, column in enumerate(own))
            for r, own in enumerate(solved.columns)
        )
        return replace(solved, columns=columns)
    groups = tuple(_group(group, g, change) for g, group in enumerate(solved.groups))
    found: SolvedPipeline = replace(solved, groups=groups)
    seconds = [stage.seconds for stage in found.stages]
    return replace(found, time=run(solved.shape, seconds, solved.between, solved.ground))


def _group(group: GroupPlan, number: int, change: Change) -> GroupPlan:
    return replace(group, chunks=tuple(_stage(chunk, number, change) for chunk in group.chunks))


def _stage(stage: StagePart, group: int, change: Change) -> StagePart:
    return replace(stage, parts=tuple(replace(p, column=change(group, p.run, p.column)) for p in stage.parts))
