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
from autopar.shard.put_off import params_put_off
from autopar.shard.storage import BUCKET_BYTES, Keeper


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one device.

    `parameters`, `optimizer`: always held. `gradients`: held from their making until they are reduced, `reduced` from
    then to the step's end. `saved`: kept for the backward of one microbatch. `transient`: the most needed at once
    beyond that while the layer runs forward or backward. `step`: temporaries when gradients are reduced, of the largest
    layer at a time; `update`: temporaries of the optimizer, of all layers at once. `inputs`: of the batch, in the layer
    that reads it first. `put_off`: what waits to become one microbatch's gradients of weights where these are made
    apart, `late` of the `gradients`; `parting`: as `transient` then, what waits of the layer included.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    transient: int
    step: int
    update: int
    reduced: int = 0
    inputs: int = 0
    put_off: int = 0
    parting: int = 0
    late: int = 0


def layer_memory(
    program: Program,
    batch: int,
    policy: DtypePolicy,
    optimizer: str,
    parameters: Sequence[HeldParameter],
    walked: Activations,
    *,
    staged: bool = False,
    hosted: bool = False,
    model_share: float = 1.0,
    next_elements: int | None = None,
    again: bool = True,
) -> LayerMemory:
    """Memory of a lowered layer at a global microbatch of `batch` samples, in a pipeline if `staged`.

    `hosted`: parameters as they are stored, and what belongs to them, are in the host's memory.

    `walked`: the program's activations. `model_share`: how many times the layer's parameters those of the model, or of
    a stage, are; `next_elements`: of those of the layer before, whose backward is next; None for as many.
    `again`: whether ZeRO 3 gathers parameters for the backward pass, too.
    """
    states = [parameter_bytes(p, policy, optimizer, staged, hosted) for p in parameters]
    gathers = _gathers(parameters, policy, staged, next_elements, again)
    saved = walked.saved + round(sum(s.gathered for s in states))
    buffers = sum(_buffer_bytes(program, name, batch) for name in program.buffers)
    apart = params_put_off(program)
    late = [p.owned and p.graded and n in apart for p, n in zip(parameters, program.params, strict=True)]
    backward = walked.growing if gathers.scattered and not staged else walked.backward
    passing = max(walked.forward + gathers.forward, gathers.entering, gathers.leaving, gathers.before - saved)
    return LayerMemory(
        parameters=buffers + round(sum(s.parameters for s in states)),
        gradients=round(sum(s.gradients for s in states)),
        optimizer=round(sum(s.optimizer for s in states)),
        saved=saved,
        transient=max(passing, backward + gathers.backward),
        step=max(_bucket_bytes(parameters, policy, model_share), gathers.scattered if staged else 0),
        update=0 if hosted else _update_bytes(parameters, policy, optimizer),
        reduced=round(sum(s.reduced for s in states)),
        put_off=walked.put_off,
        parting=max(passing, walked.parting + gathers.backward, walked.put_off - saved),
        late=round(sum(s.gradients for s, is_late in zip(states, late, strict=True) if is_late)),
    )


def _buffer_bytes(program: Program, name: str, batch: int) -> int:
    shape = local_shape(program.values[name], batch, program.layouts[name], program.axis_sizes)
    return prod(shape) * DTYPE_BYTES[program.values[name].dtype]


@dataclass(frozen=True)
class _Gathers:
    """FSDP2's buffers for a layer: before it runs forward, as that runs, as it enters its backward pass, as that runs
    and as it ends; and what its gradients are scattered from."""

    before: int = 0
    forward: int = 0
    entering: int = 0
    backward: int = 0
    leaving: int = 0
    scattered: int = 0


def _gathers(
    parameters: Sequence[HeldParameter], policy: DtypePolicy, staged: bool, next_elements: int | None, again: bool
) -> _Gathers:
    """Parameters are gathered into a flat buffer, which stays until the next layer's is used, and copied out of it.

    In ZeRO 3 the copies live while the layer runs, and the buffer of the layer that is next in the backward pass is
    gathered as this one enters its own (gloo makes a copy of what it gathers, for that long), taken to be split as this
    one's are. In ZeRO 2 copies count as saved, or in a pipeline as parameters, and there the last layer's buffer stays.
    Gradients are copied into the buffer they are scattered from, which stays until the next layer's are: after the
    layer's backward pass, or in a pipeline at the step's end. In a pipeline the end of one microbatch's backward pass
    gathers the last layer for another one's, taken to be as large as this one.
    """
    mine = [p for p in parameters if p.storage.keeper is Keeper.FSDP and not p.shared]
    if not mine:
        return _Gathers()
    gathered = sum(prod(p.shape) for p in mine) * DTYPE_BYTES[policy.compute]
    trained = sum(prod(p.shape) for p in mine if p.trained)
    whole, scattered = trained * DTYPE_BYTES[policy.compute], trained * DTYPE_BYTES[policy.gradients]
    if mine[0].storage.zero == 2:
        if staged:
            return _Gathers(2 * gathered, gathered, gathered, gathered, gathered, scattered)
        return _Gathers(3 * gathered, gathered, 0, scattered, whole + scattered, scattered)
    elements = sum(p.elements for p in mine)
    following = gathered if next_elements is None else round(gathered * next_elements / elements)
    own = gathered if again else 0
    entering = own + 2 * following
    if staged:
        return _Gathers(4 * gathered, 3 * gathered, entering, own + following, gathered + following, scattered)
    backward = own + following + scattered
    return _Gathers(3 * gathered, 2 * gathered, entering, backward, following + whole + scattered, scattered)


UPDATE_COPIES: Mapping[str, int] = {"sgd": 0, "adamw8bit": 0}
"""How many copies of all it updates a step of torch.optim's foreach implementation makes; 1 for all not named here."""


def _update_bytes(parameters: Sequence[HeldParameter], policy: DtypePolicy, optimizer: str) -> int:
    trained = sum(prod(p.stored) for p in parameters if p.owned and p.trained)
    return trained * DTYPE_BYTES[policy.states] * UPDATE_COPIES.get(optimizer, 1)


def _bucket_bytes(parameters: Sequence[HeldParameter], policy: DtypePolicy, model_share: float) -> int:
    """The buffer in which gradients are flattened to be reduced, whole, beside them.

    A bucket takes gradients of many layers: as many bytes as the model has if all of it is like this layer.
    """
    reduced = [p for p in parameters if p.owned and p.trained and p.storage.keeper is Keeper.STEP]
    size = sum(prod(p.shape) for p in reduced if p.storage.sum_axes) * DTYPE_BYTES[policy.gradients]
    return min(round(size * model_share), BUCKET_BYTES)
