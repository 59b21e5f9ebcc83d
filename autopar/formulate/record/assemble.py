"""From a solved scenario to the plan record: what was chosen, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from autopar import __version__
from autopar.cluster import Cluster, Device, device_of
from autopar.cost.work import model_flops
from autopar.formulate.chains.columns import Column
from autopar.formulate.pipelines.piped import add_up
from autopar.formulate.pipelines.scenario import SolvedPipeline
from autopar.formulate.record.carried import layer_costs
from autopar.formulate.record.predict import Layers, Prediction, predict, shares
from autopar.formulate.record.splits import roles_of
from autopar.formulate.scenario import SolvedScenario
from autopar.graph import Cut, OpGraph
from autopar.plan import CarriedCosts, Fingerprint, LayerStrategy, MeshAxis, PlanRecord, Request, StagePlan

Solved = SolvedScenario | SolvedPipeline


@dataclass(frozen=True)
class Outline:
    """What one or several stages come to. `placement`: devices of the cluster by rank; `fits`: whether memory holds
    it, on devices asked to hold so many bytes."""

    stages: tuple[StagePlan, ...]
    prediction: Prediction
    costs: CarriedCosts
    schedule: str
    groups: int
    placement: tuple[int, ...]
    fits: bool


def chosen(solved: SolvedScenario) -> Iterator[tuple[int, Column, int]]:
    """Run, column and number of consecutive layers, in the order of the layers."""
    for r, walk in enumerate(solved.solution.walks):
        for index, count in walk:
            yield r, solved.columns[r][index], count


def _one_stage(solved: SolvedScenario, asked_bytes: int | None, graph: OpGraph) -> Outline:
    layers = tuple(Layers(r, column.figures, count) for r, column, count in chosen(solved))
    count, mesh = solved.setting.num_microbatches, solved.setting.mesh
    devices, device = range(prod(solved.setting.sizes)), solved.site.device
    stage = _stage(0, devices, mesh, ((column, n) for _, column, n in chosen(solved)), graph)
    prediction = predict(layers, count, device.reserve_bytes)
    costs = layer_costs([layers], memory=[prediction.memory])
    placement = tuple(solved.site.first_device + rank for rank in devices)
    fits = _tensor_bytes(prediction) <= device.limit_bytes(asked_bytes)
    return Outline((stage,), prediction, costs, "none" if count == 1 else "accumulate", 1, placement, fits)


def _pipeline(solved: SolvedPipeline, asked_bytes: int | None, graph: OpGraph) -> Outline:
    shape, size = solved.shape, prod(solved.setting.sizes)
    stages, layers, first = [], [], 0
    for number, part in enumerate(solved.stages):
        group, lap = shape.group_of(number), number // shape.groups
        devices = range(group * size, (group + 1) * size)
        stages.append(_stage(first, devices, solved.setting.mesh, ((p.column, p.count) for p in part.parts), graph))
        first += len(stages[-1].assignment)
        after = lap * (1 + max(p.run for s in solved.stages for p in s.parts))
        layers.append(tuple(Layers(after + p.run, p.column.figures, p.count, lap) for p in part.parts))
    there = [pricer.cluster.device for pricer in solved.ground.pricers]
    alone = [
        predict(
            [x for s in shape.stages_of(g) for x in layers[s]], shape.num_microbatches,
            there[g].reserve_bytes, group.backwards, group.inputs_bytes,
        )
        for g, group in enumerate(solved.groups)
    ]  # fmt: skip
    time = solved.time
    costs = layer_costs(layers, solved.between, time.cut_s, time.shared_s, [found.memory for found in alone])
    placement = tuple(device for group in solved.ground.devices for device in group)
    fits = all(_tensor_bytes(p) <= device.limit_bytes(asked_bytes) for p, device in zip(alone, there, strict=True))
    return Outline(tuple(stages), add_up(alone, time), costs, shape.schedule, shape.groups, placement, fits)


def _tensor_bytes(prediction: Prediction) -> int:
    return sum(prediction.memory.values()) - prediction.memory["reserve"]


def assemble(
    solved: Solved,
    graph: OpGraph,
    cluster: Cluster,
    request: Request,
    fingerprint: Fingerprint,
    *,
    assumptions: tuple[str, ...],
    lower_bound_s: float | None,
    trace_s: float,
    search_s: float,
) -> PlanRecord:
    """The record of a plan, or (`lower_bound_s` None) of an estimate."""
    asked = request.memory_limit_bytes
    of = asked, graph
    outline = _pipeline(solved, *of) if isinstance(solved, SolvedPipeline) else _one_stage(solved, *of)
    device = device_of(cluster, outline.placement)
    prediction = outline.prediction
    step, memory = prediction.step_time_s, prediction.memory
    bound = None if lower_bound_s is None else _without_rounding(lower_bound_s, step)
    setting, peak = solved.setting, sum(prediction.memory.values())
    tensors = peak - memory["reserve"]
    tokens = None if graph.token_dim is None else request.global_batch * graph.token_dim.at(1)
    devices = prod(setting.sizes) * outline.groups
    rate = model_flops(graph, request.global_batch) / step / devices
    best = device.peak_flops_per_s.get(request.policy.compute)
    return PlanRecord(
        request=replace(request, seq_len=None if graph.token_dim is None else graph.token_dim.at(1)),
        fingerprint=fingerprint,
        stages=outline.stages,
        num_microbatches=setting.num_microbatches,
        microbatch_size=-(-setting.batch // _batch_ways(outline.stages[-1], -1, graph.cuts[-2], graph)),
        global_microbatch=setting.batch,
        pp_degree=outline.groups,
        schedule=outline.schedule,
        step_time_s=step,
        tokens_per_s=None if tokens is None else tokens / step,
        tokens_per_s_per_device=None if tokens is None else tokens / step / devices,
        tflops_per_device=rate / 1e12,
        mfu=rate / best if best else None,
        peak_memory_bytes=peak,
        peak_tensor_bytes=tensors,
        memory_by_category=memory,
        feasible=outline.fits,
        runnable=True,
        exact=True,
        masks=True,
        exposed_comm_s=prediction.by_kind_s.get("communication", 0.0),
        bubble_s=prediction.by_kind_s.get("bubble", 0.0),
        lower_bound_s=bound,
        gap=None if bound is None else (step - bound) / step,
        cost_sources=shares(prediction.by_source_s),
        assumptions=assumptions,
        trace_s=trace_s,
        search_s=search_s,
        num_params=sum(prod(spec.shape_at(1)) for spec in graph.params.values()),
        energy_j=None if device.power_w is None else device.power_w * devices * step,
        step_price=None if device.price_per_hour is None else device.price_per_hour / 3600 * devices * step,
        input_s=_input_s(outline.stages[0], graph, request.global_batch, device),
        placement=outline.placement,
        layer_names=tuple(layer.name for layer in graph.layers),
        time_by_kind_s=prediction.by_kind_s,
        costs=outline.costs,
        autopar_version=__version__,
    )


def _without_rounding(bound_s: float, step_s: float) -> float:
    """The bound; where it is above the step by no more than sums in another order differ, the step."""
    return step_s if step_s < bound_s <= step_s * (1 + 1e-9) else bound_s


def _stage(
    first_layer: int, devices: range, mesh: tuple[MeshAxis, ...], layers: Iterable[tuple[Column, int]], graph: OpGraph
) -> StagePlan:
    strategies: list[LayerStrategy] = []
    assignment: list[int] = []
    for column, count in layers:
        number = first_layer + len(assignment)
        entry = graph.values[graph.cuts[number].main]
        roles = roles_of(column.strategy, graph.classes[graph.layers[number].class_index], entry.batch_dim)
        strategy = replace(column.strategy, roles=roles)
        if strategy not in strategies:
            strategies.append(strategy)
        assignment += [strategies.index(strategy)] * count
    return StagePlan(first_layer, tuple(devices), mesh, tuple(strategies), tuple(assignment))


def _batch_ways(stage: StagePlan, layer: int, before: Cut, graph: OpGraph) -> int:
    """Ranks over which a layer of a stage, with the cut in front of it, deals out the batch."""
    strategy = stage.strategies[stage.assignment[layer]]
    axes = strategy.data_axes(graph.values[before.main].batch_dim)
    return prod(stage.mesh[a].size for a in axes)


def _input_s(stage: StagePlan, graph: OpGraph, batch: int, device: Device) -> float:
    """Seconds a step that a rank's samples take from the host's memory; nothing where devices compute in it.

    Beside the step, which doesn't wait for what a loader has sent ahead.
    """
    if device.backend == "cpu":
        return 0.0
    samples = -(-batch // _batch_ways(stage, 0, graph.cuts[0], graph))
    return sum(graph.values[name].bytes_at(samples) for name in graph.inputs) / device.host_bytes_per_s
