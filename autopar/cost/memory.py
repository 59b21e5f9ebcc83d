"""Bytes of one layer on one device: parameters, gradients, optimizer states, activations and temporaries.

The definition is that of docs/design.md, "Memory".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost.activations import activations
from autopar.cost.states import HeldParameter, parameter_bytes
from autopar.graph import DTYPE_BYTES, local_shape
from autopar.plan import DtypePolicy
from autopar.shard.program import Program
from autopar.shard.storage import Keeper


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
    parameters: Sequence[HeldParameter],
    recompute: str = "none",
    *,
    held: frozenset[str] = frozenset(),
    unread: frozenset[int] = frozenset(),
    promised: frozenset[int] = frozenset(),
    accumulates: bool = False,
) -> LayerMemory:
    """Memory of a lowered layer at a global microbatch of `batch` samples.

    `parameters` are those that count here (`cost/states.py`). `held`, `unread`, `promised`, `accumulates`: see
    `cost/activations.py`.
    """
    walked, again = activations(program, batch, held, unread, promised, accumulates), recompute == "full"
    states = [parameter_bytes(p, policy, optimizer) for p in parameters]
    buffers = sum(_buffer_bytes(program, name, batch) for name in program.buffers)
    return LayerMemory(
        parameters=buffers + round(sum(s.parameters for s in states)),
        gradients=round(sum(s.gradients for s in states)),
        optimizer=round(sum(s.optimizer for s in states)),
        saved=walked.recomputed_saved if again else walked.saved,
        transient=(walked.recomputed_transient if again else walked.transient) + _gathered_bytes(parameters, policy),
        step=_step_bytes(parameters, policy),
    )


def _buffer_bytes(program: Program, name: str, batch: int) -> int:
    shape = local_shape(program.values[name].shape_at(batch), program.layouts[name], program.axis_sizes)
    return prod(shape) * DTYPE_BYTES[program.values[name].dtype]


def _gathered_bytes(parameters: Sequence[HeldParameter], policy: DtypePolicy) -> int:
    """FSDP2's buffers while a layer runs: the gathered flat buffer, in ZeRO 3 the parameters copied out of it, or, in
    the backward, its whole gradients and the buffer they are scattered from."""
    mine = [p for p in parameters if p.storage.keeper is Keeper.FSDP]
    gathered = sum(prod(p.shape) * DTYPE_BYTES[policy.compute] for p in mine)
    trained = sum(prod(p.shape) for p in mine if p.trained)
    scattered = trained * (DTYPE_BYTES[policy.compute] + DTYPE_BYTES[policy.gradients])
    return max(gathered, scattered) + (gathered if any(p.storage.zero == 3 for p in mine) else 0)


def _step_bytes(parameters: Sequence[HeldParameter], policy: DtypePolicy) -> int:
    trained = [p for p in parameters if p.trained]
    largest = max((prod(p.stored) for p in trained), default=0)
    reduced = sum(prod(p.shape) for p in trained if p.storage.sum_axes and p.storage.keeper is Keeper.STEP)
    return max(2 * largest * DTYPE_BYTES[policy.states], reduced * DTYPE_BYTES[policy.gradients])
