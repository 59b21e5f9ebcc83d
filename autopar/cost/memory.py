"""Bytes of one layer on one device: parameters, gradients, optimizer states, activations and temporaries.

The definition is that of docs/design.md, "Memory".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost.activations import Activations, activations
from autopar.graph import DTYPE_BYTES, local_shape
from autopar.plan import DtypePolicy
from autopar.shard.program import Program

STATE_BYTES: Mapping[str, int | None] = {"adamw": None, "adam": None, "sgd": 0, "adafactor": 0, "adamw8bit": 2}
"""Bytes of optimizer state per parameter; None, as for optimizers not named here: two in `policy.states`."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one device.

    `parameters`, `optimizer`: always held. `gradients`: held from their making to the step. `saved`: kept for the
    backward of one microbatch. `transient`: the most needed at once beyond that while the layer runs forward or
    backward. `step`: temporaries at the optimizer step.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    transient: int
    step: int


def layer_memory(
    program: Program,
    batch: int,
    policy: DtypePolicy,
    optimizer: str,
    zero: int,
    data_ways: int,
    recompute: str = "none",
    *,
    held: frozenset[str] = frozenset(),
    foreign: frozenset[str] = frozenset(),
    unread: frozenset[int] = frozenset(),
    accumulates: bool = False,
) -> LayerMemory:
    """Memory of a lowered layer at a global microbatch of `batch` samples.

    `data_ways` ranks share what ZeRO shards. `held` names inputs that an earlier layer keeps anyway, `foreign`
    parameters that another layer owns (tied), `unread` positions of outputs for which no gradient comes back;
    `accumulates` says that gradients are summed over microbatches.
    """
    walked = activations(program, batch, held, unread, accumulates)
    states = _model_states(program, batch, policy, optimizer, zero if data_ways > 1 else 0, data_ways, foreign)
    saved, transient = _recomputed(walked) if recompute == "full" else (walked.saved, walked.transient)
    return LayerMemory(
        states.parameters, states.gradients, states.optimizer, saved, transient + states.transient, states.step
    )


def held_bytes_per_element(
    policy: DtypePolicy, optimizer: str, zero: int, ways: int, trained: bool, gradients: bool
) -> float:
    """Bytes held all the time for one element of a large parameter of which `ways` ranks hold copies before ZeRO.

    `gradients` says whether they are held all the time, too.
    """
    compute, stored = DTYPE_BYTES[policy.compute], DTYPE_BYTES[policy.parameters]
    zero, shard = (zero, 1 / ways) if zero and ways > 1 else (0, 1.0)
    held = stored * shard + (compute if _keeps_copies(zero, policy) else 0)
    if not trained:
        return held
    gradient = DTYPE_BYTES[policy.gradients] * (shard if zero >= 2 else 1.0)
    return held + _state_bytes(optimizer, policy) * shard + (gradient if gradients else 0.0)


def _keeps_copies(zero: int, policy: DtypePolicy) -> bool:
    """Whether whole parameters in the compute dtype exist beside the stored ones all the time."""
    return zero in (1, 2) or (zero == 0 and policy.compute != policy.parameters)


def _recomputed(walked: Activations) -> tuple[int, int]:
    """Saved and transient bytes when only the inputs are kept and the layer runs again in its backward."""
    return walked.inputs, walked.saved - walked.inputs_saved + walked.transient


@dataclass(frozen=True)
class _States:
    parameters: int
    gradients: int
    optimizer: int
    transient: int
    step: int


def _model_states(
    program: Program, batch: int, policy: DtypePolicy, optimizer: str, zero: int, ways: int, foreign: frozenset[str]
) -> _States:
    shapes = {
        name: local_shape(program.values[name].shape_at(batch), program.layouts[name], program.axis_sizes)
        for name in (*program.params, *program.buffers)
    }
    owned = [name for name in program.params if name not in foreign]
    trained = [shapes[name] for name in owned if program.values[name].requires_grad]
    frozen = [shapes[name] for name in owned if not program.values[name].requires_grad]
    buffers = sum(prod(shapes[name]) * DTYPE_BYTES[program.values[name].dtype] for name in program.buffers)
    whole, shard = _elements(trained, 1), _elements(trained, ways if zero else 1)
    everything, kept = _elements(trained + frozen, 1), _elements(trained + frozen, ways if zero else 1)
    size = {name: DTYPE_BYTES[getattr(policy, name)] for name in ("compute", "parameters", "gradients", "states")}
    copies = _keeps_copies(zero, policy)
    largest = max((_elements([shape], ways if zero else 1) for shape in trained), default=0)
    return _States(
        kept * size["parameters"] + (everything * size["compute"] if copies else 0) + buffers,
        (whole if zero < 2 else shard) * size["gradients"],
        shard * _state_bytes(optimizer, policy),
        _gathered_bytes(everything, whole, zero, size),
        max(2 * largest * size["states"], whole * size["gradients"] if zero < 2 and ways > 1 else 0),
    )


def _gathered_bytes(everything: int, trained: int, zero: int, size: Mapping[str, int]) -> int:
    """FSDP2's buffers while a layer runs: the gathered flat buffer, in ZeRO 3 the parameters copied out of it, or, in
    the backward, its whole gradients and the buffer they are scattered from."""
    if zero < 2:
        return 0
    gathered = everything * size["compute"]
    scattered = trained * (size["compute"] + size["gradients"])
    return max(gathered, scattered) + (gathered if zero == 3 else 0)


def _state_bytes(optimizer: str, policy: DtypePolicy) -> int:
    known = STATE_BYTES.get(optimizer)
    return 2 * DTYPE_BYTES[policy.states] if known is None else known


def _elements(shapes: Sequence[tuple[int, ...]], ways: int) -> int:
    """Elements of the largest rank's chunks when each tensor is dealt out over `ways` ranks on its first dim."""
    return sum(-(-shape[0] // ways) * prod(shape[1:]) if shape else 1 for shape in shapes)
