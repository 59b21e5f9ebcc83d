"""From a plan and a model to the module that runs."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.cells import refusal
from autopar.emit import materialize
from autopar.emit.alarm import Alarm
from autopar.emit.crossing import check_stages
from autopar.emit.groups import StageGroups
from autopar.emit.inputs import Names
from autopar.emit.joined import join, stage_alone
from autopar.emit.loss_weights import Weights, equal_means, microbatch_weights
from autopar.emit.module import ParallelModule
from autopar.emit.parameters import local
from autopar.emit.pipeline import PipelinedStage
from autopar.emit.rows import Rows
from autopar.emit.runtime import Runtime
from autopar.emit.source.read import stage_source
from autopar.emit.stage import Builder
from autopar.errors import EmitError, PlanError
from autopar.graph import DTYPE_BYTES, OpGraph
from autopar.plan import PlanRecord, installed_torch

Agree = Callable[[Tensor], Tensor] | None  # what makes a value the same on all ranks


def emit(
    record: PlanRecord,
    graph: OpGraph,
    module: nn.Module,
    *,
    device: torch.device | str,
    loss: str = "global",
    source: Path | None = None,
    alarm: Alarm | None = None,
) -> ParallelModule:
    """Build the module that runs `record` on this rank: collective over the job.

    `graph` is the trace of `module`, whose values (or, on meta, initialisers) the parameters get; the module itself is
    left as it is. `loss`: `global` weights microbatches by what they count in the loss, `mean_of_means`
    equally, and so replicas.
    `source`: a folder of files written by `write_source`, which are run. On the device `meta` nothing has values.
    `alarm`: what guards the call already.
    Raises PlanError where plan, graph and job don't belong together, EmitError on what can't be run.
    """
    if alarm is None:
        alarm = Alarm.of_job()
        with alarm.call("emission"):
            return emit(record, graph, module, device=device, loss=loss, source=source, alarm=alarm)
    check(record, graph, loss, source)
    device = torch.device(device)
    together = dist.is_initialized() and dist.get_world_size() > 1
    if together:
        _require_one_plan(record)
    agree = materialize.from_rank_0(module, device) if together and device.type != "meta" else None
    return _build(record, graph, module, device, loss, agree, alarm, source)


def emit_alone(record: PlanRecord, graph: OpGraph, module: nn.Module, *, device: torch.device | str) -> ParallelModule:
    """The same model and seed on this rank alone: one device, one microbatch, nothing recomputed."""
    request = replace(record.request, devices=1)
    alone = replace(record, request=request, stages=(stage_alone(graph),), num_microbatches=1, alternatives=())
    return _build(alone, graph, module, torch.device(device), "global", None, Alarm(None))


def _require_one_plan(record: PlanRecord) -> None:
    """Raise PlanError on every rank unless all have the same plan and torch: they would wait for each other."""
    versions: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(versions, torch.__version__)
    if len(set(versions)) > 1:
        raise PlanError(f"the ranks of this job have different versions of torch ({', '.join(versions)}); install one.")
    request = record.request
    chosen = [
        *map(asdict, record.stages),
        record.schedule,
        record.num_microbatches,
        request.seed,
        asdict(request.policy),
    ]
    here = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    if len(set(everywhere)) > 1:
        raise PlanError(
            f"the ranks of this job have different plans ({', '.join(map(str, everywhere))}). Plan once and give every "
            f"rank that plan: a file from `autopar plan -o`, or `autopar.optimize` without a plan."
        )


def _build(
    record: PlanRecord,
    graph: OpGraph,
    module: nn.Module,
    device: torch.device,
    loss: str,
    agree: Agree,
    alarm: Alarm,
    source: Path | None = None,
) -> ParallelModule:
    pipeline = None
    sources = [None if source is None else stage_source(source, record, i) for i in range(len(record.stages))]
    if len(record.stages) > 1:
        builders, rows, pipeline = join(record, graph, device, loss, sources)
    else:
        stage = record.stages[0]
        builders = [Builder(record, graph, stage, StageGroups(stage, device), source=sources[0], loss=loss)]
        rows = _rows(builders[0], loss)
    pm = ParallelModule(graph, record, Names(module, graph.constants), rows, pipeline, alarm, loss)
    runtimes: list[Runtime] = []
    for builder in builders:
        if builder.groups.coordinate is not None:
            runtimes.append(builder.runtime(module, {n: p for r in runtimes for n, p in r.publics.items()}))
    if device.type != "meta":
        held = {n for runtime in runtimes for n in (*runtime.publics, *runtime.buffers)}
        wanted = lambda n: graph.aliases.get(n, n) in held  # noqa: E731
        fill(runtimes, materialize.values(module, device, record.request.seed, wanted, agree), graph.aliases)
    if runtimes:
        pm.install(tuple(runtimes), module)
        if pipeline is not None:
            pipeline.take([r.stage for r in runtimes if isinstance(r.stage, PipelinedStage)])
    pm.train(module.training)
    return pm


def _rows(builder: Builder, loss: str) -> Rows:
    """The rows of the ranks of a plan of one stage."""
    data_axes = builder.placements[0].data_axes
    weights: Weights = equal_means(builder.graph, builder.groups.ways(data_axes))
    if loss == "global":
        visits, programs = zip(*((p.visit, p.program) for p in builder.placements), strict=True)
        weights = microbatch_weights(builder.graph, visits, programs, builder.arrival, builder.groups)
    return Rows(builder.groups, data_axes, weights, builder.record.global_microbatch)


def fill(runtimes: Sequence[Runtime], wholes: Iterable[tuple[str, Tensor]], aliases: Mapping[str, str]) -> None:
    """Put this rank's part of each whole value in place."""
    with torch.no_grad():
        for alias, whole in wholes:
            name = aliases.get(alias, alias)
            for runtime in runtimes:
                if name in runtime.publics:
                    storage, groups = runtime.storages[name], runtime.groups
                    mine = storage.stored_shard(storage.compute_shard(whole, groups), groups)
                    local(runtime.publics[name].detach()).copy_(mine)
                elif name in runtime.buffers:
                    runtime.buffers[name].copy_(whole)


def check(record: PlanRecord, graph: OpGraph, loss: str, source: Path | None = None) -> None:
    """Raise PlanError or EmitError, saying what differs, if the plan can't be run on this graph by this job."""
    if loss not in ("global", "mean_of_means"):
        raise EmitError(f"loss={loss!r}; it is 'global' or 'mean_of_means'.")
    check_graph(record, graph)
    if source is not None and loss != "global":
        raise EmitError(f"loss={loss!r}: sources are written for the global loss; leave one of the two out.")
    _check_stages(record, graph)
    _check_numbers(record)
    _check_offload(record)
    if graph.loss is None:
        raise EmitError("the model returns no loss, so there is nothing to train on. Plan it with `loss_fn=...`.")
    if record.num_microbatches > 1 and loss == "global" and not graph.separable:
        raise EmitError(
            f"the plan has {record.num_microbatches} microbatches, but the batch can't be split in time: "
            f"{graph.why_not_separable}. Plan with one microbatch, or give loss='mean_of_means'."
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    needed = max(d for stage in record.stages for d in stage.devices) + 1
    if world < needed or world != record.request.devices:
        raise PlanError(
            f"the plan is for {record.request.devices} processes (its stages use ranks up to {needed - 1}), this job "
            f"has {world}. Start it with torchrun --nproc-per-node so that they agree, or make a plan for {world}."
        )


def check_graph(record: PlanRecord, graph: OpGraph) -> None:
    """Raise PlanError unless the plan was made for this graph; warn where that was with another version of torch."""
    then, now = record.fingerprint.torch, installed_torch()
    versions = f"the plan was made with torch {then}, this is torch {now}" if then not in ("", now) else ""
    if record.fingerprint.graph != graph.digest:
        why = f"{versions}, which may trace it otherwise; else " if versions else ""
        raise PlanError(
            f"the plan was made for a model with graph hash {record.fingerprint.graph}, this one has {graph.digest}: "
            f"{why}layers, shapes or example inputs differ. Make a plan for this model."
        )
    if versions:
        warnings.warn(f"{versions}: the model is traced alike, but its operators may take other times.", stacklevel=2)


def _check_numbers(record: PlanRecord) -> None:
    """Raise PlanError where the plan's batch isn't that of its microbatches, or its dtypes are none."""
    batch, count, each = record.request.global_batch, record.num_microbatches, record.global_microbatch
    unknown = sorted({*asdict(record.request.policy).values()} - {*DTYPE_BYTES})
    if count < 1 or count * each != batch or unknown:
        dtypes = f", dtypes {', '.join(map(repr, unknown))} that there aren't" if unknown else ""
        raise PlanError(
            f"the plan has {count} microbatches of {each} samples for a global batch of {batch}{dtypes}. "
            f"Make the plan anew."
        )


def _check_offload(record: PlanRecord) -> None:
    """Raise EmitError where something is offloaded that can't be."""
    for strategy in (strategy for stage in record.stages for strategy in stage.strategies):
        if strategy.offload == "activations" and (len(record.stages) > 1 or strategy.recompute != "none"):
            raise EmitError("the plan offloads activations in a pipeline, or such as run again. Make the plan anew.")
        if strategy.offload == "optimizer" and strategy.zero > 1:
            raise EmitError(f"the plan offloads states of ZeRO {strategy.zero}, which FSDP2 keeps. Make the plan anew.")


def _check_stages(record: PlanRecord, graph: OpGraph) -> None:
    """Raise EmitError where the plan's schedule can't be run, PlanError where its stages don't fit the model."""
    if len(record.stages) == 1:
        check_stages(graph, record.stages, 1, "1f1b")
        return
    strategies = [strategy for stage in record.stages for strategy in stage.strategies]
    zero, recompute = {s.zero for s in strategies}, {s.recompute for s in strategies}
    count, groups = record.num_microbatches, record.pp_degree
    if reason := refusal(record.schedule, zero, recompute, len(record.stages), count, groups):
        raise EmitError(f"the plan can't be run: {reason}. Make the plan anew.")
    check_stages(graph, record.stages, groups, record.schedule)
