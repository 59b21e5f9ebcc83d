"""Bytes of one layer on one device: parameters, gradients, optimizer states, activations and temporaries.

The definition is that of docs/design.md, "Memory".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost.activations import Activations
from autopar.cost.states import HeldParameter, parameter_bytes
from autopar.graph import DTYPE_BYTES, local_shape
from autopar.plan import DtypePolicy
from autopar.shard.program import Program
from autopar.shard.storage import BUCKET_BYTES, Keeper


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one device.

    `parameters`, `optimizer`: always held. `gradients`: held from their making to the step. `saved`: kept for the
    backward of one microbatch. `transient`: the most needed at once beyond that while the layer runs forward or
    backward. `step`: temporaries when gradients are reduced, of the largest layer at a time; `update`: temporaries of
    the optimizer, of all layers at once.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    transient: int
    step: int
    update: int


def layer_memory(
    program: Program,
    batch: int,
    policy: DtypePolicy,
    optimizer: str,
    parameters: Sequence[HeldParameter],
    walked: Activations,
    model_share: float = 1.0,
) -> LayerMemory:
    """Memory of a lowered layer at a global microbatch of `batch` samples.

    `parameters` are those that count here (`cost/states.py`), `walked` the program's activations. `model_share`: how
    many times the layer's parameters those of the model are.
    """
    states = [parameter_bytes(p, policy, optimizer) for p in parameters]
    buffers = sum(_buffer_bytes(program, name, batch) for name in program.buffers)
    return LayerMemory(
        parameters=buffers + round(sum(s.parameters for s in states)),
        gradients=round(sum(s.gradients for s in states)),
        optimizer=round(sum(s.optimizer for s in states)),
        saved=walked.saved,
        transient=walked.transient + _gathered_bytes(parameters, policy),
        step=_bucket_bytes(parameters, policy, optimizer, model_share),
        update=_update_bytes(parameters, policy, optimizer),
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


UPDATE_COPIES: Mapping[str, int] = {"sgd": 0, "adamw8bit": 0}
"""How many copies of all it updates a step of torch.optim's foreach implementation makes; 1 for all not named here."""


def _update_bytes(parameters: Sequence[HeldParameter], policy: DtypePolicy, optimizer: str) -> int:
    trained = sum(prod(p.stored) for p in parameters if p.trained)
    return trained * DTYPE_BYTES[policy.states] * UPDATE_COPIES.get(optimizer, 1)


def _bucket_bytes(parameters: Sequence[HeldParameter], policy: DtypePolicy, optimizer: str, model_share: float) -> int:
    """The buffer in which gradients are flattened to be reduced, whole, beside them.

    A bucket takes gradients of many layers: as many bytes as the model has if all of it is like this layer. Where the
    whole gradients outlive their reduction, the optimizer's own copies take as much room later, so no more is counted.
    """
    reduced = [p for p in parameters if p.trained and p.storage.sum_axes and p.storage.keeper is Keeper.STEP]
    covered = UPDATE_COPIES.get(optimizer, 1) > 0
    size = sum(prod(p.shape) for p in reduced if p.storage.zero or not covered) * DTYPE_BYTES[policy.gradients]
    return min(round(size * model_share), BUCKET_BYTES)
