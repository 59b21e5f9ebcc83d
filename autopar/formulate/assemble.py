"""From a solved scenario to the plan record: what was chosen, and what it is predicted to cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from autopar import __version__
from autopar.cluster import Cluster
from autopar.cost.work import model_flops
from autopar.formulate.scenario import Column, SolvedScenario
from autopar.graph import OpGraph
from autopar.plan import Fingerprint, LayerStrategy, PlanRecord, Request, StagePlan

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "transient", "reserve")


@dataclass(frozen=True)
class Prediction:
    """What the columns chosen for the layers add up to."""

    step_time_s: float
    by_kind_s: dict[str, float]
    by_source_s: dict[str, float]
    memory: dict[str, int]


def chosen(solved: SolvedScenario) -> Iterator[tuple[int, Column, int]]:
    """Run, column and number of consecutive layers, in the order of the layers."""
    for r, walk in enumerate(solved.solution.walks):
        for index, count in walk:
            yield r, solved.columns[r][index], count


def predict(solved: SolvedScenario, reserve_bytes: int) -> Prediction:
    """Add up the seconds of a step and the bytes at its peak."""
    m = solved.setting.num_microbatches
    kinds: dict[str, float] = defaultdict(float)
    sources: dict[str, float] = defaultdict(float)
    for _, column, count in chosen(solved):
        figures = column.figures
        for total, micro, step in (
            (kinds, figures.micro_by_kind_s, figures.step_by_kind_s),
            (sources, figures.micro_by_source_s, figures.step_by_source_s),
        ):
            for key, seconds in micro.items():
                total[str(key)] += m * seconds * count
            for key, seconds in step.items():
                total[str(key)] += seconds * count
    memory = max(_moments(solved), key=lambda moment: sum(moment.values()))
    return Prediction(sum(kinds.values()), dict(kinds), dict(sources), memory | {"reserve": reserve_bytes})


def _moments(solved: SolvedScenario) -> Iterator[dict[str, int]]:
    """Bytes by category at each moment of docs/design.md, "Memory"."""
    layers = list(chosen(solved))
    last = max(r for r, _, _ in layers)
    accumulated = solved.setting.num_microbatches > 1
    for moment in range(last + 2):
        at_step = moment > last
        held = dict.fromkeys(CATEGORIES[:-1], 0)
        for r, column, count in layers:
            memory = column.figures.memory
            held["parameters"] += memory.parameters * count
            held["optimizer"] += memory.optimizer * count
            held["gradients"] += memory.gradients * count if at_step or accumulated or r >= moment else 0
            held["activations"] += memory.saved * count if r <= moment and not at_step else 0
            extra = memory.step if at_step else memory.transient if r == moment else 0
            held["transient"] = max(held["transient"], extra)
        yield held


def assemble(
    solved: SolvedScenario,
    graph: OpGraph,
    cluster: Cluster,
    request: Request,
    fingerprint: Fingerprint,
    *,
    limit_bytes: int,
    assumptions: tuple[str, ...],
    lower_bound_s: float | None,
    trace_s: float,
    search_s: float,
) -> PlanRecord:
    """The record of a plan, or (`lower_bound_s` None) of an estimate; `limit_bytes` bounds its tensor bytes."""
    device = cluster.device
    prediction = predict(solved, device.reserve_bytes)
    step, memory = prediction.step_time_s, prediction.memory
    setting, peak = solved.setting, sum(prediction.memory.values())
    tensors = peak - memory["reserve"]
    tokens = None if graph.token_dim is None else request.global_batch * graph.token_dim.at(1)
    devices = prod(setting.sizes)
    rate = model_flops(graph, request.global_batch) / step / devices
    best = device.peak_flops_per_s.get(request.policy.compute)
    stage = _stage(solved)
    return PlanRecord(
        request=replace(request, seq_len=None if graph.token_dim is None else graph.token_dim.at(1)),
        fingerprint=fingerprint,
        stages=(stage,),
        num_microbatches=setting.num_microbatches,
        microbatch_size=max(1, setting.batch // _loss_ways(stage, graph)),
        global_microbatch=setting.batch,
        pp_degree=1,
        schedule="none" if setting.num_microbatches == 1 else "accumulate",
        step_time_s=step,
        tokens_per_s=None if tokens is None else tokens / step,
        tokens_per_s_per_device=None if tokens is None else tokens / step / devices,
        tflops_per_device=rate / 1e12,
        mfu=rate / best if best else None,
        peak_memory_bytes=peak,
        peak_tensor_bytes=tensors,
        memory_by_category=memory,
        feasible=tensors <= limit_bytes,
        runnable=True,
        exact=True,
        masks=True,
        exposed_comm_s=prediction.by_kind_s.get("communication", 0.0),
        bubble_s=0.0,
        lower_bound_s=None if lower_bound_s is None else min(lower_bound_s, step),
        gap=None if lower_bound_s is None else max(0.0, (step - lower_bound_s) / step),
        cost_sources=_shares(prediction.by_source_s),
        assumptions=assumptions,
        trace_s=trace_s,
        search_s=search_s,
        num_params=sum(prod(spec.shape_at(1)) for spec in graph.params.values()),
        energy_j=None if device.power_w is None else device.power_w * devices * step,
        input_s=None,
        placement=tuple(range(devices)),
        layer_names=tuple(layer.name for layer in graph.layers),
        time_by_kind_s=prediction.by_kind_s,
        autopar_version=__version__,
    )


def _shares(by_source_s: dict[str, float]) -> dict[str, float]:
    total = sum(by_source_s.values()) or 1.0
    return {
        source: by_source_s.get(source, 0.0) / total for source in ("measured", "fitted", "roofline", "extrapolated")
    }


def _stage(solved: SolvedScenario) -> StagePlan:
    strategies: list[LayerStrategy] = []
    assignment: list[int] = []
    for _, column, count in chosen(solved):
        if column.strategy not in strategies:
            strategies.append(column.strategy)
        assignment += [strategies.index(column.strategy)] * count
    devices = tuple(range(prod(solved.setting.sizes)))
    return StagePlan(0, devices, solved.setting.mesh, tuple(strategies), tuple(assignment))


def _loss_ways(stage: StagePlan, graph: OpGraph) -> int:
    """Batch ways at the last layer, which makes the loss."""
    strategy = stage.strategies[stage.assignment[-1]]
    axes = strategy.data_axes(graph.values[graph.cuts[-2].main].batch_dim)
    return prod(stage.mesh[a].size for a in axes)
