"""Stages joined to a pipeline: what each is given and sends, who holds which parameter, which rows a rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from autopar.emit.crossing import Comparison, mesh_sizes, plan_ports
from autopar.emit.groups import Axes, StageGroups
from autopar.emit.loss_weights import Weights, equal_means, microbatch_weights
from autopar.emit.pipeline import Feed, Pipeline
from autopar.emit.placements import arrival_layouts, place_layers
from autopar.emit.rows import Rows
from autopar.emit.source.read import StageSource
from autopar.emit.stage import Builder, Link
from autopar.emit.storage import Storage
from autopar.emit.teams import Teams
from autopar.errors import PlanError
from autopar.graph import REPLICATE, Layout, OpGraph
from autopar.plan import LayerStrategy, PlanRecord, StagePlan


def stage_alone(graph: OpGraph) -> StagePlan:
    """All layers of the model on this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return StagePlan(0, (rank,), (), (LayerStrategy((), (), {}, {}),), (0,) * len(graph.layers))


def join(
    record: PlanRecord, graph: OpGraph, device: torch.device, loss: str, sources: Sequence[StageSource | None]
) -> tuple[list[Builder], Rows, Pipeline]:
    """The builders of all stages, this rank's rows and the pipeline; collective over the job, as groups are made."""
    stages, count, feed = record.stages, record.pp_degree, Feed()
    made: dict[object, StageGroups] = {}
    groups = [made.setdefault((stage.devices, stage.mesh), StageGroups(stage, device)) for stage in stages]
    both = Comparison.of(stages)
    links = plan_links(record, graph, feed, both)
    builders = [Builder(record, graph, *each, loss) for each in zip(stages, groups, links, sources, strict=True)]
    _check_tied(builders, both)
    teams = Teams(graph, stages, count, record.schedule)
    rows = _rows(graph, stages[:count], builders[0], teams.team or 0, loss)
    return builders, rows, Pipeline(graph, record, teams, feed, device)


def plan_links(record: PlanRecord, graph: OpGraph, feed: Feed, both: Comparison) -> list[Link]:
    """How each stage stands in the pipeline."""
    stages, batch, first = record.stages, record.global_microbatch, record.stages[0]
    arrival = arrival_layouts(graph, place_layers(graph, first)[0].data_axes, len(first.mesh))
    reads = [{n for x in graph.layers[s.first_layer :][: len(s.assignment)] for n in x.params} for s in stages]
    everything = set(graph.params)
    links = []
    for k, (stage, port) in enumerate(zip(stages, plan_ports(graph, stages, batch), strict=True)):
        inputs = {}
        for name, layout in arrival.items():
            both.check(graph.values[name], batch, layout, mesh_sizes(first), f"input {name}")
            inputs[name] = both.elsewhere(layout, mesh_sizes(first), mesh_sizes(stage), f"input {name}")
        unread = everything.difference(*reads) if k == 0 else set()
        mine = reads[k] | unread
        before = set().union(*(reads[i] for i in range(k) if stages[i].devices == stage.devices))
        links.append(Link(port, inputs, everything - mine, mine & before, feed, both))
    return links


def _rows(graph: OpGraph, firsts: tuple[StagePlan, ...], builder: Builder, team: int, loss: str) -> Rows:
    """The rows of each rank: those of its place in the first stage's mesh, whatever group of devices it is in."""
    axes, device = builder.placements[0].data_axes, builder.groups.device
    every = [builder.groups]
    every += [StageGroups(replace(firsts[0], devices=stage.devices), device) for stage in firsts[1:]]
    if axes:
        for groups in every:
            groups.group(axes)
    weights = _weights(graph, every[team], axes, loss)
    return Rows(every[team], axes, weights, builder.record.global_microbatch, piped=True)


def _weights(graph: OpGraph, groups: StageGroups, axes: Axes, loss: str) -> Weights:
    """What weighs microbatches: each rank counts in its own rows."""
    if loss != "global":
        return equal_means(graph, groups.ways(axes))
    alone = StageGroups(stage_alone(graph), groups.device)
    visits, programs = zip(*((p.visit, p.program) for p in place_layers(graph, stage_alone(graph))), strict=True)
    arrival: dict[str, Layout] = dict.fromkeys(graph.inputs, ())
    return microbatch_weights(graph, visits, programs, arrival, alone, (groups, axes))


def _check_tied(builders: list[Builder], both: Comparison) -> None:
    """Raise PlanError where stages that hold the same parameter would hold different parts of it at one place."""
    seen: dict[str, Builder] = {}
    for builder in builders:
        for name, storage in builder.storages.items():
            other = seen.setdefault(name, builder)
            if other is not builder:
                spec, sizes = builder.graph.params[name], builder.groups.sizes
                both.check(spec, 1, storage.layout, sizes, f"parameter {name}")
            if _lies(storage, builder.groups, both) != _lies(other.storages[name], other.groups, both):
                raise PlanError(
                    f"parameter {name} is read by two pipeline stages that want different parts of it on each device. "
                    f"Plan with the same split and ZeRO level for both, or untie it."
                )


def _lies(storage: Storage, groups: StageGroups, both: Comparison) -> tuple[object, ...]:
    """How a parameter is cut up: equal where every place holds the same part."""
    cut = tuple(max(p, REPLICATE) for p in storage.layout)
    dealt = tuple(int(a in storage.chunk_axes) for a in groups.all_axes)
    if not any(p >= 0 for p in cut) and not any(dealt):
        return ()
    return both.sizes(groups.sizes), both.layout(cut, groups.sizes), both.layout(dealt, groups.sizes)
