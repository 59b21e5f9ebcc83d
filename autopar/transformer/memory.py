"""Bytes of a step on the fullest device: states by the framework's policy, activations in flight, temporaries, reserve.

Activations are what autograd keeps of a block (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022: s b h (34 + 5 a s / h) for GPT with dropout and scores in memory), divided as tensor,
sequence and context parallel divide them, times the microbatches that the schedule has under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from autopar.cluster import Device
from autopar.cost.orders import Shape as PipelineShape
from autopar.cost.schedule import holdings
from autopar.dims import Dims
from autopar.transformer.calls import local_tokens
from autopar.transformer.layout import Layout
from autopar.transformer.stages import stage_blocks

CONTEXT_BYTES, SLACK, COMMUNICATION_BYTES = 2.0e9, 0.05, 4.0e9
"""What a process holds beside its tensors: driver and libraries, the allocator's holes as a share of tensors, and
buffers of the collectives' library. Fitted to published totals."""

LOGITS_BYTES, LEAN_LOGITS_BYTES, KEPT_LOGITS = 14.0, 6.0, 0.36
"""A logit in the half dtype, widened, its probability and gradients; or with a loss that works in place; and the share
of it that is kept from the forward to the backward pass."""

DEALT_LOGITS_BYTES = 18.0
"""A logit where DTensor's loss runs on a vocabulary that is dealt out: its backward pass makes one float32 value more
(torch/distributed/tensor/parallel/loss.py)."""

HALF = 2.0
"""Bytes of a value in 16 bits, in which the formulas of activations count."""


@dataclass(frozen=True)
class Bytes:
    """Bytes at the peak by category. `logits` and `gathered` parameters are parts of `transient`; `context` and the
    allocator's `slack` are held beside tensors."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    context: float
    slack: float
    logits: float = 0.0
    gathered: float = 0.0

    @property
    def tensors(self) -> float:
        """Bytes of tensors alone."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All that the device's tools show."""
        return self.tensors + self.context + self.slack


def peak_bytes(shape: Dims, layout: Layout) -> Bytes:
    """Bytes on the fullest device."""
    return max((stage_bytes(shape, layout, group) for group in range(layout.pp)), key=lambda found: found.total)


def fits(found: Bytes, device: Device) -> bool:
    """Whether a device's usable bytes hold it; holes of the allocator close when memory is short."""
    return found.total - found.slack <= device.usable_bytes


def stage_bytes(shape: Dims, layout: Layout, group: int) -> Bytes:
    """Bytes on a device of the pipeline's group `group`."""
    blocks = stage_blocks(shape, layout)
    stages = layout.pipeline.stages_of(group)
    mine = [blocks[s] for s in stages]
    first, last = 0 in stages, len(blocks) - 1 in stages
    dense, expert = _elements(shape, layout, sum(mine), first=first, last=last)
    parameters, gradients, optimizer, gathered = _states(shape, layout, dense, expert)
    kept, whole = kept_bytes(shape, layout), block_bytes(shape, layout)
    states = saved_states(layout, group)
    sent = _sent_bytes(shape, layout)
    each = [n * kept + (sent if s + 1 < len(blocks) else 0.0) for n, s in zip(mine, stages, strict=True)]
    activations = max(sum(n * k for n, k in zip(each, state, strict=True)) for state in states)
    logits = _logits(shape, layout) if last else 0.0
    rerun = whole if kept < whole else 0.0
    joined = (
        3 * layout.width * local_tokens(shape, layout) * shape.hidden if layout.sequence else 0.0
    )  # made whole again
    transient = max(logits, rerun + 0.5 * whole + joined) + gathered
    transient = max(transient, _made_in_step(layout, gradients) - activations)
    holes = SLACK * (parameters + gradients + optimizer + activations + transient)
    multi = layout.devices > 1
    return Bytes(parameters, gradients, optimizer, activations, transient,
                 CONTEXT_BYTES + COMMUNICATION_BYTES * multi, holes, logits, gathered)  # fmt: skip


def _elements(shape: Dims, layout: Layout, blocks: float, *, first: bool, last: bool) -> tuple[float, float]:
    """Elements of dense parameters and of experts on a device, before data-parallel sharding."""
    feed = shape.expert_params
    each = (shape.block_params - max(1, shape.experts) * feed + (0 if shape.experts else feed)) / layout.tp
    split = layout.expert_ways if layout.expert_ways > 1 else layout.tp
    ends = (first + (last and not (first and shape.tied))) * shape.embedding_params / layout.tp
    return blocks * each + ends, blocks * shape.experts * feed / split


def _states(shape: Dims, layout: Layout, dense: float, expert: float) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, optimizer states, and of what is gathered for a while."""
    ways = layout.shard_ways
    ranks = max(1, layout.data_ranks * layout.tp // layout.expert_ways) if layout.expert_ways > 1 else layout.data_ranks
    expert_ways = min(ways, ranks) if layout.zero else 1
    sharded, whole = dense / ways + expert / expert_ways, dense + expert
    policy = layout.conventions
    width = layout.width
    if policy.half_states:
        spread = sharded if layout.zero == 3 else whole
        adds_up = policy.whole_gradients and layout.num_microbatches > 1
        gathered = 4.0 * (whole - spread) / max(1, shape.layers)
        if layout.zero == 3:  # the outermost unit is gathered from its forward to its backward pass
            gathered += 2.0 * (1 if shape.tied else 2) * shape.embedding_params / layout.tp
        return 2.0 * spread, 2.0 * (whole if adds_up else spread), layout.state_bytes / 2 * sharded, gathered
    if layout.zero == 3:
        block = shape.block_params / layout.tp / (layout.expert_ways if shape.experts else 1)
        gathered = max(2 * block * width, shape.embedding_params / layout.tp * width) + block * policy.gradient_bytes
        if layout.pp > 1:  # parameters stay gathered, and gradients whole, until the step ends
            gathered = width * whole + max(0.0, policy.gradient_bytes * whole - 4.0 * sharded)
        wide = 4.0 if policy.extra_state_bytes else 0.0  # gradients are in float32 already
        return 4.0 * sharded, 4.0 * sharded, (layout.state_bytes + policy.extra_state_bytes - wide) * sharded, gathered
    master = 0.0 if width == 4.0 else 4.0
    held = max(width, layout.of_gradients(policy.held_gradient_bytes))
    gradients = held * (sharded if layout.zero == 2 else whole)
    return width * whole, gradients, (layout.state_bytes + master + policy.extra_state_bytes) * sharded, 0.0


def _sent_bytes(shape: Dims, layout: Layout) -> float:
    """Bytes of a microbatch that a stage has sent and keeps for the backward pass."""
    if not layout.conventions.keeps_sent:
        return 0.0
    return layout.width * local_tokens(shape, layout) * shape.hidden / (layout.tp if layout.sequence else 1)


def _made_in_step(layout: Layout, gradients: float) -> float:
    """Bytes of gradients that were summed in float16 and are widened for the optimizer, where nothing else is left."""
    widened = layout.compute == "float16" and layout.conventions.held_gradient_bytes == 4 and layout.zero < 3
    return 2 * gradients / layout.shard_ways if widened else 0.0


def block_bytes(shape: Dims, layout: Layout) -> float:
    """What autograd keeps of one block for one microbatch on one device."""
    tokens, t = local_tokens(shape, layout), layout.tp
    h, inner = shape.hidden, shape.heads * shape.head_dim / t
    shared = max(1.0, shape.kv_heads / t) * shape.head_dim
    dropout = layout.conventions.dropout
    eager = layout.conventions.eager
    widened = 8 if eager and not shape.bias else 0  # RMS norms keep their input in float32, and the result unscaled
    whole = (8 + widened + 2 * dropout) * h / (t if layout.sequence else 1)  # of both norms and of both first products
    attention = 2 * (inner + 2 * shared) + (4 if eager else 2) * inner  # eager: also with heads beside one another
    per_token = shape.topk if shape.experts else 1
    wide = shape.ffn / (1 if shape.experts and layout.ep > 1 else t)
    gated = 8 if eager else 6  # eager: also the gate before it is multiplied
    fed = per_token * wide * (gated if shape.gated else 4) / (t if shape.experts and layout.ep > 1 else 1)
    # in expert order, and the experts' results before and after they are sent; whole where ranks split each expert
    routed = 6.0 * per_token * h / (t if layout.ep > 1 else 1) if shape.experts else 0.0
    total = tokens * (whole + attention + fed + routed) * layout.conventions.keeps
    return total * layout.width / HALF + score_bytes(shape, layout)


def score_bytes(shape: Dims, layout: Layout) -> float:
    """What is kept of scores where they reach memory: the softmax, and with dropout its mask and result."""
    if layout.fused_attention:
        return 0.0
    scores = layout.microbatch * shape.heads / layout.tp * shape.seq * shape.seq / layout.cp
    return scores * (2 * layout.width + 1 if layout.conventions.dropout else layout.width)


def kept_bytes(shape: Dims, layout: Layout) -> float:
    """Of `block_bytes`, what is kept until the backward pass under the layout's recomputation, a block on average."""
    whole = block_bytes(shape, layout)
    inputs = layout.width * local_tokens(shape, layout) * shape.hidden / (layout.tp if layout.sequence else 1)
    if layout.selective and not layout.recomputed:
        rerun = layout.conventions.rerun
        return (1 - rerun) * whole if rerun else whole - score_bytes(shape, layout)
    return layout.recomputed * inputs + (1 - layout.recomputed) * whole


def _logits(shape: Dims, layout: Layout) -> float:
    dealt = layout.tp > 1 and layout.conventions.dtensor
    each = LEAN_LOGITS_BYTES if layout.conventions.lean_loss else DEALT_LOGITS_BYTES if dealt else LOGITS_BYTES
    return local_tokens(shape, layout) * shape.vocab / layout.tp * each


def saved_states(layout: Layout, group: int) -> tuple[tuple[int, ...], ...]:
    """The fullest states of a group's devices: of how many microbatches each of its chunks holds activations."""
    count, p = layout.num_microbatches, layout.pp
    if p == 1:
        return ((1,),)
    return _saved_states(layout.schedule, p, layout.chunks, count, group)


@lru_cache(maxsize=4096)
def _saved_states(schedule: str, groups: int, chunks: int, count: int, group: int) -> tuple[tuple[int, ...], ...]:
    """What is kept until gradients of weights are made counts whole."""
    if schedule != "gpipe":
        count = min(count, 4 * groups)  # beyond that nothing changes
    if schedule == "dualpipev":
        count = max(count, 2 * groups)
    if schedule in ("interleaved", "zb") and count % groups:
        count = max(groups, count - count % groups)
    shape = PipelineShape(schedule, groups, chunks, count)
    return tuple(
        {
            tuple(map(sum, zip_longest(holding.saved, holding.put_off, fillvalue=0)))
            for holding in holdings(shape, group)
        }
    )
