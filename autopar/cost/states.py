"""What one device holds of parameters: their local shapes and storages, and the bytes of all that belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from autopar.graph import DTYPE_BYTES, local_shape
from autopar.plan import DtypePolicy
from autopar.shard.program import Program
from autopar.shard.storage import Axes, Keeper, ParameterStorage, dealt_shape, parameter_storage

STATE_BYTES: Mapping[str, int | None] = {"adamw": None, "adam": None, "sgd": 0, "adafactor": 0, "adamw8bit": 2}
"""Bytes of optimizer state per parameter; None, as for optimizers not named here: two in `policy.states`."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter on one device.

    `elements`: of the whole parameter. `shape`: of the shard that layers compute with, in `dtype`; `stored`: of the
    largest part of it that a rank stores.
    `owned`: whether it counts in this layer, the first of its stage that reads it; `graded`: whether its gradient does,
    in the last. `shared`: whether several layers of the stage read it.
    """

    elements: int
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: str
    trained: bool
    storage: ParameterStorage
    owned: bool = True
    graded: bool = True
    shared: bool = False


@dataclass(frozen=True)
class StateBytes:
    """Bytes held: of parameters with their copies, of gradients until and (`reduced`) from their reduction on, of
    optimizer states; `gathered`: of copies that are there from a layer's forward pass to its backward pass."""

    parameters: float
    gradients: float
    reduced: float
    optimizer: float
    gathered: float = 0.0


@dataclass(frozen=True)
class Uses:
    """Of a layer's parameters by name: `foreign` count in an earlier layer, the gradients of `pending` in a later one.

    `shared` are read by other layers of the stage, too.
    """

    foreign: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()


def held_parameters(program: Program, zero_axes: Axes, zero: int, uses: Uses = Uses()) -> list[HeldParameter]:
    """The parameters of a lowered layer."""
    found = []
    for name in program.params:
        spec, layout = program.values[name], program.layouts[name]
        storage = parameter_storage(spec, layout, zero_axes, zero)
        shape = local_shape(spec, 1, layout, program.axis_sizes)
        stored = dealt_shape(shape, storage.ways(program.axis_sizes))
        counts = (name not in uses.foreign, name not in uses.pending, name in uses.shared)
        whole = prod(spec.shape_at(1))
        found.append(HeldParameter(whole, shape, stored, spec.dtype, spec.requires_grad, storage, *counts))
    return found


def parameter_bytes(
    parameter: HeldParameter, policy: DtypePolicy, optimizer: str, staged: bool = False, hosted: bool = False
) -> StateBytes:
    """Bytes of one parameter, as far as they count in its layer.

    Of one that is stored on the host (`hosted`) the device has what layers compute with, and gradients until these are
    reduced.
    """
    whole = prod(parameter.shape)
    found = state_bytes(
        whole, prod(parameter.stored), parameter.storage, parameter.trained, parameter.dtype, policy, optimizer, staged
    )
    if hosted:
        found = StateBytes(whole * DTYPE_BYTES[parameter.dtype], found.gradients, 0, 0)
    if parameter.shared and parameter.storage.keeper is Keeper.FSDP:
        # FSDP2's root holds it: gathered while the stage runs, its gradient whole until the backward pass has ended.
        copy = whole * DTYPE_BYTES[parameter.dtype]
        found = replace(
            found,
            parameters=found.parameters + copy,
            gathered=0.0,
            gradients=found.gradients + (copy if parameter.trained and not staged else 0),
        )
    owned, graded = float(parameter.owned), float(parameter.graded)
    return StateBytes(
        found.parameters * owned, found.gradients * graded, found.reduced * graded, found.optimizer * owned,
        found.gathered * owned,
    )  # fmt: skip


def state_bytes(
    whole: float,
    stored: float,
    storage: ParameterStorage,
    trained: bool,
    dtype: str,
    policy: DtypePolicy,
    optimizer: str,
    staged: bool = False,
) -> StateBytes:
    """Bytes of `whole` elements that layers compute with in `dtype`, of which this rank stores `stored`.

    Beside what is stored there are copies to compute with all the time where it is gathered or cast once a step (ZeRO
    0 and 1), or gathered and kept (2) from the forward to the backward pass; in a pipeline these overlap, so that they
    count as held all the time. Gradients are whole until they are reduced: once a step, or (2, 3, unless the layer is
    one of a pipeline's stage) at once. From then on they are as large as what is stored, where they are scattered.
    """
    zero = storage.zero
    copies = zero == 1 or (zero == 2 and staged) or (zero == 0 and dtype != policy.parameters)
    parameters = stored * DTYPE_BYTES[policy.parameters] + (whole * DTYPE_BYTES[dtype] if copies else 0)
    gathered = whole * DTYPE_BYTES[dtype] if zero == 2 and not staged else 0.0
    if not trained:
        return StateBytes(parameters, 0, 0, 0, gathered)
    width = DTYPE_BYTES[policy.gradients]
    gradients = (whole if zero < 2 or staged else stored) * width
    reduced = (stored if storage.scatters else whole) * width
    return StateBytes(parameters, gradients, reduced, stored * _optimizer_bytes(optimizer, policy), gathered)


def _optimizer_bytes(optimizer: str, policy: DtypePolicy) -> int:
    known = STATE_BYTES.get(optimizer)
    return 2 * DTYPE_BYTES[policy.states] if known is None else known
