"""One stage of a plan on this rank: its layers lowered, its parameters stored, its module built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autopar.emit.crossing import Comparison, Port
from autopar.emit.groups import StageGroups
from autopar.emit.layers import LayerModule, ParameterHolder, StageModule
from autopar.emit.local_means import placed
from autopar.emit.parameters import StageParameter, local
from autopar.emit.pipeline import Feed, PipelinedStage
from autopar.emit.placements import Placement, arrival_layouts
from autopar.emit.program import ProgramCode, Submodule
from autopar.emit.route import Route, Visit, plan_route
from autopar.emit.runtime import Runtime
from autopar.emit.source.read import StageSource
from autopar.emit.split import WeightGradients
from autopar.emit.storage import Storage, parameter_uses, plan_storage, shard
from autopar.graph import REPLICATE, Layout, OpGraph
from autopar.plan import PlanRecord, StagePlan
from autopar.schedules import SPLIT
from autopar.shard.gathering import backward_reads_parameters
from autopar.shard.host import host_memory
from autopar.shard.localize import groups_of
from autopar.shard.storage import Keeper
from autopar.trace.torch_private import named_tensors


@dataclass(frozen=True)
class Link:
    """How a stage stands in its pipeline.

    `inputs` are the layouts of the model's own inputs, over the same axes as those of `port`. `elsewhere` names the
    parameters that are others' to hold, `again` those that an earlier stage on the same devices holds, too.
    """

    port: Port
    inputs: dict[str, Layout]
    elsewhere: Set[str]
    again: Set[str]
    feed: Feed
    both: Comparison


def compared(visit: Visit, sizes: tuple[int, ...], both: Comparison) -> Visit:
    """`visit` with its layouts over the axes that stages are compared on."""
    ins, outs = (tuple(both.layout(x, sizes) for x in of) for of in (visit.input_layouts, visit.output_layouts))
    return Visit(visit.inputs, ins, visit.outputs, outs)


def stage_route(
    graph: OpGraph, placements: list[Placement], link: Link | None, groups: StageGroups, seam: StageGroups
) -> Route:
    """The way of values through a stage; `seam` are its groups over the axes that stages are compared on."""
    visits = [p.visit for p in placements]
    if link is None:
        axes = len(groups.sizes)
        arrival = arrival_layouts(graph, placements[0].data_axes, axes)
        return plan_route(graph, visits, arrival, {graph.loss or "": (REPLICATE,) * axes}, groups)
    visits = [compared(visit, groups.sizes, link.both) for visit in visits]
    return plan_route(graph, visits, link.inputs | link.port.receives, link.port.sends, seam)


class Builder:
    """Builds one stage. Every rank, idle ones too, walks the same way, as process groups are made on it."""

    def __init__(
        self,
        record: PlanRecord,
        graph: OpGraph,
        stage: StagePlan,
        groups: StageGroups,
        link: Link | None = None,
        source: StageSource | None = None,
        loss: str = "global",
    ) -> None:
        self.record, self.graph, self.stage, self.groups, self.link = record, graph, stage, groups, link
        self.source = source
        self.placements = placed(record, graph, stage, loss)
        found = plan_storages(graph, self.placements, record, len(stage.mesh))
        if link is not None:
            found = {n: s for n, s in found.items() if n not in link.elsewhere}
            found |= {n: replace(s, zero=1) for n, s in found.items() if n in link.again and s.keeper is Keeper.FSDP}
        self.storages = found
        self.arrival = arrival_layouts(graph, self.placements[0].data_axes, len(stage.mesh))
        self.seam = groups.over_primes(stage) if link is not None and link.both.primes else groups
        self.route = stage_route(graph, self.placements, link, groups, self.seam)
        self._make_groups()

    def _make_groups(self) -> None:
        """Make the process groups in one order on all ranks."""
        if self.groups.ways(self.groups.all_axes) == 1:
            return
        wanted = {axes for p in self.placements for axes in groups_of(p.program)}
        wanted |= {axes for p in self.placements for axes in (p.data_axes, p.zero_axes)} | {self.groups.all_axes}
        for storage in self.storages.values():
            wanted |= {*storage.mesh_dims(self.groups), storage.chunk_axes, storage.sum_axes, storage.remaining_axes}
        for axes in sorted(wanted - {()}):
            self.groups.group(axes)

    def runtime(self, module: nn.Module, others: dict[str, nn.Parameter]) -> Runtime:
        """What this rank runs, its values still unset; `others` are the parameters of its earlier stages."""
        read = {n for p in self.placements for n in p.layer.buffers}
        held_here = self.graph.buffers if self.link is None else [n for n in self.graph.buffers if n in read]
        values = dict(named_tensors(module))
        buffers = {n: torch.empty_like(values[n].detach(), device=self.groups.device) for n in held_here}
        used = {n for p in self.placements for n in p.layer.params}
        stepped = {n: s for n, s in self.storages.items() if s.keeper is Keeper.STEP and n in used}
        steps = {n: self._step_parameter(s, others.get(n)) for n, s in stepped.items()}
        stage, held = self._stage(buffers, steps, module.get_submodule)
        publics = {n: p.public for n, p in steps.items()}
        publics |= {n: self._public(s, self._empty(s)) for n, s in self.storages.items() if n not in used}
        kept = []
        for name, (holder, attribute) in held.items():
            sharded = holder.get_parameter(attribute)
            kept.append((self.storages[name], sharded))
            publics[name] = self._public(self.storages[name], local(sharded.detach()))
        return Runtime(stage, self.groups, self.storages, {n: publics[n] for n in self.storages}, buffers,
                       tuple(steps.values()), tuple(kept))  # fmt: skip

    def _step_parameter(self, storage: Storage, held: nn.Parameter | None) -> StageParameter:
        stored = self._empty(storage) if held is None else local(held.detach())
        public = self._public(storage, stored) if held is None else held
        return StageParameter(storage, stored, public, self._compute_shape(storage), self.groups.device)

    def _empty(self, storage: Storage) -> Tensor:
        """Memory for what this rank stores of a parameter."""
        computed = torch.empty(self._compute_shape(storage), device="meta")
        shape = storage.stored_shard(computed, self.groups).shape
        device = self.groups.device
        if storage.hosted and device.type != "meta":
            return host_memory(shape, storage.dtype, device)
        return torch.empty(shape, dtype=storage.dtype, device=device)

    def _public(self, storage: Storage, stored: Tensor) -> nn.Parameter:
        return nn.Parameter(storage.as_dtensor(stored, self.groups), storage.trainable)

    def _compute_shape(self, storage: Storage) -> torch.Size:
        return storage.compute_shard(torch.empty(storage.shape, device="meta"), self.groups).shape

    def _stage(
        self, buffers: dict[str, Tensor], steps: dict[str, StageParameter], submodule: Submodule
    ) -> tuple[StageModule, Held]:
        """The stage on this rank, and where FSDP's parameters are held."""
        codes: dict[int, ProgramCode] = {}
        late = WeightGradients() if self.record.schedule in SPLIT else None
        modules = []
        if self.source is not None:
            self.source.bind(self.groups, self.seam, submodule)
        for i, placement in enumerate(self.placements):
            program = placement.program
            code = codes.setdefault(id(program), ProgramCode(program, self.groups, submodule, late))
            written = None if self.source is None else self.source.layer(i, program)
            offloads = placement.strategy.offload == "activations"
            modules.append(LayerModule(self.stage.first_layer + i, placement.layer.name, written or code, offloads))
        stage = self._stage_module(modules, late)
        shared = shared_parameters(self.placements)
        held: Held = {}
        for placement, layer in zip(self.placements, modules, strict=True):
            for name in placement.layer.params:
                if name in steps:
                    layer.sources.append(steps[name].source)
                    continue
                if name not in held:
                    holder = stage if name in shared else layer
                    held[name] = holder, self._hold(holder, self.storages[name])
                layer.sources.append(held[name][0].reader(held[name][1]))
            self._read_buffers(placement, layer, buffers)
        if held:
            self._fully_shard(stage, modules, held)
        return stage, held

    def _stage_module(self, modules: list[LayerModule], late: WeightGradients | None) -> StageModule:
        route = self.route if self.source is None else self.source
        if self.link is None:
            return StageModule(modules, route)
        return PipelinedStage(modules, route, self.graph, self.link.port, self.link.feed, self.seam.spot, late)

    def _hold(self, holder: ParameterHolder, storage: Storage) -> str:
        tensor = torch.empty(self._compute_shape(storage), dtype=storage.dtype, device="meta")
        return holder.hold(storage.name, tensor, storage.trainable)

    def _read_buffers(self, placement: Placement, layer: LayerModule, buffers: dict[str, Tensor]) -> None:
        for name, local_name in zip(placement.layer.buffers, placement.program.buffers, strict=True):
            part = shard(buffers[name], placement.program.layouts[local_name], self.groups)
            if (value := self.graph.updates.get(name)) in placement.layer.outputs:
                layer.updates.append((buffers[name], placement.layer.outputs.index(value)))
            # A buffer that changes is read as a copy: what is saved for backward, or run again there, is as it was.
            layer.sources.append(part.clone if name in self.graph.updates else lambda part=part: part)  # type: ignore[misc]

    def _fully_shard(self, stage: StageModule, modules: list[LayerModule], held: Held) -> None:
        """Hand layers to FSDP2, then the stage: without a root of its own each microbatch would end a step."""
        policy = self.record.request.policy
        precision = MixedPrecisionPolicy(
            getattr(torch, policy.compute), getattr(torch, policy.gradients), cast_forward_inputs=False
        )
        for placement, layer in zip(self.placements, modules, strict=True):
            if any(holder is layer for holder, _ in held.values()):
                line = self.groups.line(placement.zero_axes)
                turns = self.link is None and layer is modules[-1]  # its backward pass follows at once
                freed = placement.strategy.zero == 3 and not turns
                fully_shard(layer, mesh=line, reshard_after_forward=freed, mp_policy=precision)
                spared = freed and self.source is None and not backward_reads_parameters(placement.program)
                layer.set_unshard_in_backward(not spared)  # type: ignore[operator]
        own = next((self.storages[n].chunk_axes for n, (holder, _) in held.items() if holder is stage), None)
        line = self.groups.line(own or self.groups.all_axes)
        fully_shard(stage, mesh=line, reshard_after_forward=False, mp_policy=precision)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # losses are normalised already: gradients are sums
                module.set_force_sum_reduction_for_comms(True)
        stage.to_empty(device=self.groups.device)


Held: TypeAlias = "dict[str, tuple[ParameterHolder, str]]"
"""Where FSDP's parameters are: the module that holds each, and under which attribute."""


def shared_parameters(placements: list[Placement]) -> set[str]:
    """Parameters that more than one layer reads."""
    readers = Counter(name for p in placements for name in set(p.layer.params))
    return {name for name, count in readers.items() if count > 1}


def plan_storages(graph: OpGraph, placements: list[Placement], record: PlanRecord, axes: int) -> dict[str, Storage]:
    """The storage of every parameter.

    FSDP2 has one mesh for the parameters that several layers share: those that need another are kept by us.
    """
    uses = parameter_uses(graph, ((p.layer, p.strategy, p.zero_axes, p.program.layouts) for p in placements))
    found = {n: plan_storage(n, spec, uses[n], record.request.policy, axes) for n, spec in graph.params.items()}
    several = shared_parameters(placements)
    shared = [s for n, s in found.items() if n in several and s.keeper is Keeper.FSDP]
    for storage in shared:
        if storage.chunk_axes != shared[0].chunk_axes:
            found[storage.name] = replace(storage, zero=1)
    return found
