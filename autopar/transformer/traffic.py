"""Collectives of a step: what each of its pieces sends over which group of devices, in seconds by closed form.

Ranks are laid out as Megatron does: tensor parallel nearest, then context, data and pipeline parallel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import log2

from autopar.cluster import Cluster, adds_up
from autopar.cost.collectives import fitted_times, ranks_by_level, seen_by
from autopar.dims import Dims
from autopar.graph import CollectiveKey
from autopar.measure.models.device import DeviceModel
from autopar.transformer.calls import local_tokens
from autopar.transformer.layout import Conventions, Layout


@dataclass(frozen=True)
class Wire:
    """Seconds inside a node and between nodes, before calibration, and rounds of messages between nodes."""

    inside: float = 0.0
    between: float = 0.0
    rounds: float = 0.0

    def __add__(self, other: Wire) -> Wire:
        return Wire(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Wire:
        return Wire(*(getattr(self, f.name) * factor for f in fields(self)))

    def dealt(self, how: Conventions) -> Wire:
        """The same bytes as a framework sends parameters: in so many messages, at a share of the links' rates."""
        slower = self * (1 / how.link_share)
        return replace(slower, rounds=self.rounds * how.messages)


NO_WIRE = Wire()

NEAR = 0.25
"""Time of a message inside a node, as a share of one between nodes."""


def wire(kind: str, size_bytes: float, ranks: int, stride: int, cluster: Cluster, model: DeviceModel) -> Wire:
    """A collective over `ranks` devices each `stride` apart.

    Over several nodes it is the library's ring through all ranks: every node's edge carries the whole of it, dealt out
    over the links of the group's `local` devices there. Sums travel up and down trees, so that few messages follow each
    other, or once through switches that add up; gathers and scatters go round.
    """
    if ranks <= 1 or size_bytes <= 0:
        return NO_WIRE
    per_node = cluster.devices_per_node if cluster.nodes > 1 else 0
    local, nodes = ranks_by_level(ranks, stride, per_node)
    if nodes == 1:
        times = fitted_times([CollectiveKey(kind, int(size_bytes), ranks, stride)], cluster, model)
        return Wire(inside=float(times.seconds[0]))
    inter = seen_by(kind, ranks, stride, per_node, cluster.intra, cluster.inter)
    if kind == "all_to_all":  # what stays in the node travels beside what leaves it
        return Wire(between=(nodes - 1) / nodes * size_bytes / inter.bytes_per_s, rounds=nodes - 1)
    twice = 2.0 if kind == "all_reduce" else 1.0
    carried = twice * (ranks - 1) / ranks * size_bytes
    within, between = carried / cluster.intra.bytes_per_s, carried / (local * inter.bytes_per_s)
    added = kind == "all_reduce" and adds_up(inter)
    between = size_bytes / (local * inter.bytes_per_s) if added else between
    if between < within:
        return Wire(inside=within)
    if added:
        return Wire(between=between, rounds=2.0)
    around = nodes - 1 + NEAR * (ranks - nodes)
    rounds = min(around, 4 * log2(nodes)) if kind == "all_reduce" else around
    return Wire(between=between, rounds=rounds)


@dataclass(frozen=True)
class Traffic:
    """What a step sends.

    In a block, a microbatch and a direction: `tensor_forward`, `tensor_backward`, `context` (keys and values around the
    ring, forward), `experts` (there and back, forward). A microbatch between stages: `boundary`. Once a step: of a
    block's gradients `gradients`, of its parameters `parameters`, of the embedding's `ends`; `tied` between first and
    last stage. Under ZeRO 3 a block's `gather` and `scatter` in every microbatch, and the ends'.
    """

    tensor_forward: Wire
    tensor_backward: Wire
    context: Wire
    experts: Wire
    boundary: Wire
    gradients: Wire
    parameters: Wire
    ends_gradients: Wire
    ends_parameters: Wire
    tied: Wire


def traffic(shape: Dims, layout: Layout, cluster: Cluster, model: DeviceModel) -> Traffic:
    """All collectives of a step, before calibration and before any is hidden."""
    activation = local_tokens(shape, layout) * shape.hidden * 2.0
    tensor = _tensor(layout, activation, cluster, model)
    ring = wire("all_gather", _keys(shape, layout), layout.cp, layout.tp, cluster, model)
    rows = activation * shape.topk / layout.tp if shape.experts else 0.0
    exchanged = wire("all_to_all", rows, layout.ep, 1, cluster, model)
    exchanged = replace(exchanged, between=exchanged.between * _once_a_node(shape, layout, cluster)) * 2.0
    dense, expert = shape.attention_params + shape.hidden, shape.experts * shape.expert_params
    if not shape.experts:
        dense, expert = shape.block_params, 0
    ends = shape.embedding_params / layout.tp
    gradients = _reduced(dense / layout.tp, layout, cluster, model, 1) + _reduced(
        expert / _expert_split(layout), layout, cluster, model, layout.ep
    )
    parameters = _gathered(dense / layout.tp, layout, cluster, model, 1) + _gathered(
        expert / _expert_split(layout), layout, cluster, model, layout.ep
    )
    # split by sequence parallelism, or as Megatron did in 2021: each tensor rank sends its share, gathered behind
    split = layout.tp if layout.sequence or layout.conventions.dropout else 1
    return Traffic(
        tensor[0], tensor[1], ring, exchanged, _sent(activation / split, layout, cluster),
        gradients.dealt(layout.conventions), parameters.dealt(layout.conventions),
        _reduced(ends, layout, cluster, model, 1), _gathered(ends, layout, cluster, model, 1),
        _tied(shape, layout, ends, cluster, model),
    )  # fmt: skip


def _once_a_node(shape: Dims, layout: Layout, cluster: Cluster) -> float:
    """A token goes once to a node, however many of its experts are there: the nodes that it meets over its experts."""
    nodes = max(1, layout.ep // cluster.devices_per_node)
    return nodes * (1 - (1 - 1 / nodes) ** shape.topk) / shape.topk if shape.experts else 1.0


def _expert_split(layout: Layout) -> int:
    return layout.ep if layout.ep > 1 else layout.tp


def _keys(shape: Dims, layout: Layout) -> float:
    """Bytes of all ranks' keys and values of a split sequence, on one tensor rank."""
    return 2 * 2.0 * layout.microbatch * shape.seq * max(1.0, shape.kv_heads / layout.tp) * shape.head_dim


def _tensor(layout: Layout, activation: float, cluster: Cluster, model: DeviceModel) -> tuple[Wire, Wire]:
    """Two sums of activations each way; in sequence parallel gathers and scatters, and two gathers more backward."""
    if layout.sequence:
        gather = wire("all_gather", activation, layout.tp, 1, cluster, model)
        scatter = wire("reduce_scatter", activation, layout.tp, 1, cluster, model)
        return gather * 2.0 + scatter * 2.0, gather * 4.0 + scatter * 2.0
    summed = wire("all_reduce", activation, layout.tp, 1, cluster, model) * 2.0
    return summed, summed


def _sent(size_bytes: float, layout: Layout, cluster: Cluster) -> Wire:
    """A boundary's activations from stage to stage."""
    if layout.pp == 1:
        return NO_WIRE
    apart = layout.dp * layout.cp * layout.tp
    if cluster.nodes == 1 or apart * layout.pp <= cluster.devices_per_node:
        return Wire(inside=size_bytes / cluster.intra.bytes_per_s)
    inter = seen_by("broadcast", 2, apart, cluster.devices_per_node, cluster.intra, cluster.inter)
    return Wire(between=size_bytes / inter.bytes_per_s, rounds=1.0)


def _groups(layout: Layout, ep: int) -> tuple[int, int, int]:
    """Ranks that share a gradient, of these those a shard group has, and their distance."""
    stride = ep if ep > 1 else layout.tp
    ranks = max(1, layout.data_ranks * (layout.tp if ep > 1 else 1) // max(1, ep))
    ways = min(layout.shard_ways, ranks) if layout.zero else 1
    return ranks, ways, stride


def _reduced(elements: float, layout: Layout, cluster: Cluster, model: DeviceModel, ep: int) -> Wire:
    """Gradients: summed over all ranks, or scattered over a shard group and summed over the others."""
    ranks, ways, stride = _groups(layout, ep)
    size = elements * layout.of_gradients(layout.conventions.gradient_bytes)
    if ways == 1:
        return wire("all_reduce", size, ranks, stride, cluster, model)
    scattered = wire("reduce_scatter", size, ways, stride, cluster, model)
    return scattered + wire("all_reduce", size / ways, ranks // ways, stride * ways, cluster, model)


def _gathered(elements: float, layout: Layout, cluster: Cluster, model: DeviceModel, ep: int) -> Wire:
    """Parameters, gathered over a shard group."""
    _, ways, stride = _groups(layout, ep)
    return wire("all_gather", elements * 2.0, ways, stride, cluster, model)


def _tied(shape: Dims, layout: Layout, ends: float, cluster: Cluster, model: DeviceModel) -> Wire:
    """The tied embedding's gradient, summed over the first and the last stage."""
    if not shape.tied or layout.pp == 1:
        return NO_WIRE
    apart = layout.dp * layout.cp * layout.tp
    return wire("all_reduce", ends * layout.of_gradients(layout.conventions.gradient_bytes), 2, apart, cluster, model)
