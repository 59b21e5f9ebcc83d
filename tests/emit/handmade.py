"""Plans written by hand: every op of every layer splits the factors that are asked for where it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.graph import BROADCAST, REPLICATE, LayerClass, Layout, Op, OpGraph
from autopar.plan import POLICIES, Fingerprint, LayerStrategy, MeshAxis, PlanRecord, Request, StagePlan
from autopar.shard.rules import rule_for


def mesh_of(*sizes: int) -> tuple[MeshAxis, ...]:
    """Axes of these sizes, the last with neighbouring ranks."""
    axes, stride = [], 1
    for i, size in reversed(list(enumerate(sizes))):
        axes.append(MeshAxis(f"d{i}", size, stride))
        stride *= size
    return tuple(reversed(axes))


def batch_factor(op: Op, layer: LayerClass) -> str:
    """The factor of `op` that grows with the batch, '' if it has none."""
    rule = rule_for(op, layer)
    if rule is None:
        return ""
    return next((f.name for f in rule.factors if f.extent.is_batch), "")


def data_parallel(
    graph: OpGraph, index: int, data: Sequence[bool], zero: int = 0, recompute: str = "none"
) -> LayerStrategy:
    """Layer `index` with its batch split over the axes where `data` is true, everything whole on the others."""
    layer = graph.classes[graph.layers[index].class_index]
    ops = {}
    for op in layer.ops:
        factor = batch_factor(op, layer)
        ops[op.name] = tuple(factor if d else "" for d in data)
    stored: Layout = tuple(BROADCAST if d else REPLICATE for d in data)
    return LayerStrategy(
        _cut_layout(graph, index, data), _cut_layout(graph, index + 1, data), ops,
        dict.fromkeys(layer.params, stored), zero, recompute,
    )  # fmt: skip


def _cut_layout(graph: OpGraph, cut: int, data: Sequence[bool]) -> Layout:
    dim = graph.values[graph.cuts[cut].main].batch_dim
    return tuple(dim if d and dim is not None else REPLICATE for d in data)


def record_of(
    graph: OpGraph,
    mesh: tuple[MeshAxis, ...],
    strategy: Callable[[int], LayerStrategy],
    *,
    global_batch: int,
    num_microbatches: int = 1,
    dtype: str = "fp64",
    devices: int | None = None,
    seed: int = 0,
) -> PlanRecord:
    """A plan of one stage in which layer i runs under `strategy(i)`; predictions are left empty."""
    ranks = 1
    for axis in mesh:
        ranks *= axis.size
    wanted = [strategy(i) for i in range(len(graph.layers))]
    strategies: list[LayerStrategy] = []
    strategies.extend(s for s in wanted if s not in strategies)
    assignment = tuple(strategies.index(s) for s in wanted)
    stage = StagePlan(0, tuple(range(ranks)), mesh, tuple(strategies), assignment)
    request = Request("", "", "cpu", devices or ranks, global_batch, dtype, POLICIES[dtype], "adamw", seed=seed)
    return PlanRecord(
        request=request, fingerprint=Fingerprint(graph.digest, "", "cpu"), stages=(stage,),
        num_microbatches=num_microbatches, microbatch_size=1, global_microbatch=global_batch // num_microbatches,
        pp_degree=1, schedule="1f1b", step_time_s=0.0, tokens_per_s=None, tokens_per_s_per_device=None,
        tflops_per_device=0.0, mfu=None, peak_memory_bytes=0, peak_tensor_bytes=0, memory_by_category={}, feasible=True,
        runnable=True, exact=True, masks=True, exposed_comm_s=0.0, bubble_s=0.0, lower_bound_s=None, gap=None,
        cost_sources={}, assumptions=(), trace_s=0.0, search_s=0.0, num_params=0, energy_j=None, input_s=None,
        placement=tuple(range(ranks)), layer_names=tuple(x.name for x in graph.layers), time_by_kind_s={},
    )  # fmt: skip
