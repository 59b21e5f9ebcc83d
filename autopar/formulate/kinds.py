"""What makes one plan another kind of plan than another: not the number of microbatches alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from autopar.formulate.pipelines.scenario import SolvedPipeline
from autopar.formulate.record.assemble import Solved, chosen
from autopar.plan import LayerStrategy, MeshAxis
from autopar.roles import ways

Kind: TypeAlias = tuple[object, ...]


def kind_of(solved: Solved) -> Kind:
    """Pipeline and schedule, and what most layers do: degrees, ZeRO, recomputation."""
    mesh = solved.setting.mesh
    if not isinstance(solved, SolvedPipeline):
        return (1, _most(((column.strategy, count) for _, column, count in chosen(solved)), mesh))
    parts = [part for stage in solved.stages for part in stage.parts]
    most = _most(((part.column.strategy, part.count) for part in parts), mesh)
    return (solved.shape.groups, solved.shape.chunks, solved.shape.schedule, most)


def _most(layers: Iterable[tuple[LayerStrategy, int]], mesh: tuple[MeshAxis, ...]) -> Kind:
    """What most layers do; `layers` are strategies with the number of layers under each."""
    counts: Counter[Kind] = Counter()
    for strategy, count in layers:
        counts[(*sorted(ways(strategy, mesh).items()), strategy.zero, strategy.recompute)] += count
    return counts.most_common(1)[0][0]
