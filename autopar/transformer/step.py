"""Seconds of a step: pieces of work and traffic, put together on the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

from autopar.cells import misfit
from autopar.cluster import Cluster
from autopar.cost.orders import Shape as PipelineShape
from autopar.cost.roofline import model_of
from autopar.cost.schedule import simulate
from autopar.cost.sync import exposed_s
from autopar.dims import Dims
from autopar.measure.models.form import joined_numbers
from autopar.transformer.calls import Local, Piece, block_piece, embedding_piece, head_piece
from autopar.transformer.constants import Constants
from autopar.transformer.layout import Layout
from autopar.transformer.stages import stage_blocks
from autopar.transformer.traffic import Traffic, Wire, traffic

OPTIMIZER_BYTES, ADAM_BYTES = 34.0, 8.0
"""Adam in float32 with a half-precision copy: reads gradient, master and moments, writes the latter and the copy. Its
moments are the second of these."""

SHARPNESS = 3.0
"""How sharply a piece turns from being bound by the host to being bound by the device."""

SIMULATED = 200_000
"""Operations of a schedule above which its closed form is taken."""


@dataclass(frozen=True)
class Costs:
    """All that a step asks for, before calibration."""

    shape: Dims
    layout: Layout
    block: Piece
    embedding: Piece
    head: Piece
    traffic: Traffic
    nodes: int
    device: tuple[str, str]
    link: str
    network: str
    bytes_per_s: float


def costs_of(shape: Dims, layout: Layout, cluster: Cluster) -> Costs:
    """Price the pieces of a step on a cluster."""
    device, model = cluster.device, model_of(cluster.device)
    nodes = -(-layout.devices // cluster.devices_per_node)
    return Costs(
        shape, layout, block_piece(shape, layout, model), embedding_piece(shape, layout, model),
        head_piece(shape, layout, model), traffic(shape, layout, cluster, model), nodes,
        (device.architecture, device.name), cluster.intra.name, cluster.inter.name, device.memory_bytes_per_s,
    )  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of these what nothing hides."""

    step_time_s: float
    communication_s: float
    bubble_s: float
    optimizer_s: float


def step_time(costs: Costs, constants: Constants, *, simulated: bool = True, straggler: float = 1.0) -> StepTime:
    """Put a step together; by the pipeline's closed form unless `simulated`.

    One device of the busiest stage takes `straggler` times as long as the others, which wait for it.
    """
    return _Assembly(costs, constants).together(simulated=simulated, straggler=straggler)


@dataclass(frozen=True)
class _Passes:
    """Seconds of a piece's passes, and of these exposed communication."""

    forward: float
    backward: float
    exposed: float = 0.0


class _Assembly:
    def __init__(self, costs: Costs, constants: Constants) -> None:
        self.costs, self.layout, self.known = costs, costs.layout, constants
        self.hides = costs.layout.conventions

    def local(self, work: Local, sent: float = 0.0, calls: int = 0) -> float:
        """Seconds of local work with `calls` collectives that take `sent` in it.

        The device bounds it, or the host that starts the kernels and collectives.
        """
        known, which = self.known, self.costs.device
        attention = known.of("attention", *which) * (1 if self.hides.library_attention else known.of("plain_attention"))
        device = (
            work.gemm * known.of("gemm", *which) + work.narrow * known.of("narrow", *which)
            + work.grouped * known.of("grouped", *which) + work.attention * attention
            + work.moved * known.of("moved", *which)
        )  # fmt: skip
        device += work.kernels * known.of("gap_us") * 1e-6 + sent
        host = (work.kernels * known.of("kernel_us") + calls * known.of("call_us")) * 1e-6
        return joined_numbers(device, host, SHARPNESS)

    def sent(self, wire: Wire) -> float:
        """Seconds of a collective."""
        known = self.known
        return (
            wire.inside * known.of("inside", self.costs.link) + wire.between * known.of("between", self.costs.network)
            + wire.rounds * known.of("round_us") * 1e-6
        )  # fmt: skip

    def together(self, *, simulated: bool, straggler: float) -> StepTime:
        layout, costs = self.layout, self.costs
        block, ends = self.block(), self.ends()
        stages = stage_blocks(costs.shape, layout)
        forward = [n * block.forward for n in stages]
        backward = [n * block.backward for n in stages]
        forward[0] += ends[0].forward
        backward[0] += ends[0].backward
        forward[-1] += ends[1].forward
        backward[-1] += ends[1].backward
        boundary = self.sent(costs.traffic.boundary)
        extra = self.known.of("pass_us") * 1e-6
        forward = [f + extra for f in forward]
        backward = [b + extra for b in backward]
        each = self.weights(costs.block.backward)
        weights = [n * each for n in stages]
        weights[-1] += self.weights(costs.head.backward)
        teams = [layout.pipeline.stages_of(g) for g in range(layout.pp)]
        for stage in max(teams, key=lambda team: sum(forward[s] + backward[s] for s in team)):
            forward[stage], backward[stage] = straggler * forward[stage], straggler * backward[stage]
            weights[stage] *= straggler
        busy, piped = self.pipelined(forward, backward, weights, boundary, simulated=simulated)
        own = max(sum(stages[s] for s in team) for team in teams)
        optimizer = self.optimizer()
        synced = self.synchronised(own, backward, forward)
        slower = 1 + self.known.of("straggle") * log2(max(1, costs.nodes))
        total = (piped + optimizer + synced) * slower + self.known.of("step_ms") * 1e-3
        exposed = layout.num_microbatches * own * block.exposed + synced
        return StepTime(total, exposed, piped - busy, optimizer)

    def block(self) -> _Passes:
        """A block's passes over a microbatch with the communication that nothing hides."""
        costs, layout, known = self.costs, self.layout, self.known
        forward, backward = self.local(costs.block.forward), self.local(costs.block.backward)
        again = layout.recomputed * forward
        if layout.selective and not layout.recomputed:
            again = self.hides.rerun * forward or self.local(costs.block.core)
        shown = 1 - known.of("tensor_hidden") if self.hides.hides_tp and layout.sequence else 1.0
        tensor = self.sent(costs.traffic.tensor_forward) * shown
        returned = self.returned(backward) * shown
        ring = self.sent(costs.traffic.context) * (1 - known.of("context_hidden"))
        routed = self.sent(costs.traffic.experts) * known.of("routing")
        calls = (4 if layout.sequence else 2) if layout.tp > 1 else 0
        sent, back = tensor + ring + routed, returned + 2 * ring + routed
        passed, returning = (
            self.local(w, s, calls) for w, s in ((costs.block.forward, sent), (costs.block.backward, back))
        )
        back += layout.recomputed * sent
        if layout.recomputed:
            again = layout.recomputed * passed
        shown_forward, shown_backward = 0.0, 0.0
        if layout.zero == 3:
            gather, scatter = self.sent(costs.traffic.parameters), self.sent(costs.traffic.gradients)
            hidden = known.of("shard_hidden")
            shown_forward = exposed_s(gather, forward, hidden)
            shown_backward = exposed_s(gather + scatter, backward + again, hidden)
        shown_all = shown_forward + shown_backward
        return _Passes(passed + shown_forward, returning + again + shown_backward, sent + back + shown_all)

    def returned(self, backward: float) -> float:
        """Seconds of tensor parallelism's collectives in a block's backward pass that its own products don't hide.

        Megatron runs the sum (or scatter) of a gradient, and the gather of an input, beside the product for the
        weights, half of the pass: with sequence parallelism two thirds of its six collectives, else both.
        """
        taken = self.sent(self.costs.traffic.tensor_backward)
        if not self.hides.hides_backward:
            return taken
        beside = taken * (2 / 3 if self.layout.sequence else 1.0)
        return taken - beside + exposed_s(beside, backward / 2, self.known.of("tensor_hidden"))

    def ends(self) -> tuple[_Passes, _Passes]:
        """Embedding and head."""
        costs = self.costs
        first = _Passes(self.local(costs.embedding.forward), self.local(costs.embedding.backward))
        last = _Passes(self.local(costs.head.forward), self.local(costs.head.backward))
        if self.layout.zero == 3:
            gather, scatter = self.sent(costs.traffic.ends_parameters), self.sent(costs.traffic.ends_gradients)
            first = _Passes(first.forward + gather, first.backward + scatter)
        return first, last

    def weights(self, backward: Local) -> float:
        """Seconds of the products of a backward pass that make gradients of weights, half of them all."""
        return self.local(Local(backward.gemm, backward.narrow, backward.grouped) * 0.5)

    def pipelined(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        weights: Sequence[float],
        boundary: float,
        *,
        simulated: bool,
    ) -> tuple[float, float]:
        """Seconds that the busiest group works, and seconds from the first pass to the last."""
        p, shape = self.layout.pp, self.layout.pipeline
        m = shape.num_microbatches
        busy = max(m * sum(forward[s] + backward[s] for s in shape.stages_of(g)) for g in range(p))
        if p == 1:
            return busy, busy
        legal = m >= p and not misfit(shape.schedule, shape.stages, p, m)
        if simulated and legal and 3 * m * shape.stages <= SIMULATED:
            times = [tuple(round(x, 9) for x in xs) for xs in (forward, backward, weights)]
            return busy, _simulated(shape, times[0], times[1], times[2], boundary)
        return busy, busy + self.bubble(forward, backward, weights, boundary)

    def bubble(
        self, forward: Sequence[float], backward: Sequence[float], weights: Sequence[float], boundary: float
    ) -> float:
        """Seconds of filling and draining, by the closed forms of the schedules' papers.

        With F, B and W the passes of a chunk forward, backward, and of B what makes gradients of weights: (p - 1) times
        F + B (1F1B, GPipe, interleaved), F + B - 2 W (ZB-H1), F + B - 3 W but no less than F (ZB-V), F + 2 B - 3 W
        (DualPipeV, where nothing overlaps) (Qi et al., "Zero bubble pipeline parallelism", 2023; DeepSeek-AI,
        "DeepSeek-V3 technical report", 2024).
        """
        f, b, w = (sum(xs) / len(xs) for xs in (forward, backward, weights))
        idle = {
            "zb": max(0.0, f + b - 2 * w), "zbv": max(f, f + b - 3 * w), "dualpipev": max(0.0, f + 2 * b - 3 * w)
        }.get(self.layout.schedule, f + b)  # fmt: skip
        return (self.layout.pp - 1) * (idle + 2 * boundary)

    def synchronised(self, blocks: float, backward: Sequence[float], forward: Sequence[float]) -> float:
        """Exposed seconds of gradients and parameters, once a step, on the stage that has the embedding."""
        layout, flow = self.layout, self.costs.traffic
        if layout.zero == 3:
            return self.sent(flow.ends_gradients)
        ends = 1.0 if layout.pp > 1 or self.costs.shape.tied else 2.0
        gradients = self.sent(flow.gradients) * blocks + self.sent(flow.ends_gradients) * ends
        parameters = self.sent(flow.parameters) * blocks + self.sent(flow.ends_parameters) * ends
        tied = self.sent(flow.tied)
        often = layout.num_microbatches if layout.zero == 2 else 1  # gradients are dealt out as they come
        if layout.data_ranks == 1 or not self.hides.hides_dp:
            return often * gradients + parameters + tied
        hidden = self.known.of("data_hidden")
        stages = layout.pipeline.stages_of(0)
        last = sum(backward[s] for s in stages)
        first = sum(forward[s] for s in stages)
        return often * exposed_s(gradients, last, hidden) + exposed_s(parameters, first, hidden) + tied

    def optimizer(self) -> float:
        """Seconds of the optimizer's step over this rank's share."""
        shape, layout = self.costs.shape, self.layout
        dense = shape.attention_params + (0 if shape.experts else shape.expert_params)
        experts = shape.experts * shape.expert_params
        blocks = max(stage_blocks(shape, layout)) * layout.chunks
        own = dense * blocks / layout.tp / layout.shard_ways
        if experts:
            ranks = max(1, layout.data_ranks * layout.tp // layout.expert_ways)
            own += experts * blocks / layout.expert_ways / (min(layout.shard_ways, ranks) if layout.zero else 1)
        own += shape.embedding_params / layout.tp / layout.shard_ways * (1 if layout.pp > 1 or shape.tied else 2)
        moved = OPTIMIZER_BYTES + 2 * (layout.state_bytes - ADAM_BYTES)  # states are read and written
        return own * moved / self.costs.bytes_per_s * self.known.of("optimizer")


@lru_cache(maxsize=4096)
def _simulated(
    shape: PipelineShape,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    weights: tuple[float, ...],
    boundary: float,
) -> float:
    sent = [0.0 if shape.group_of(s) == shape.group_of(s + 1) else boundary for s in range(shape.stages - 1)]
    return simulate(shape, forward, backward, sent, [0.0] * shape.stages, weights).step_time_s
