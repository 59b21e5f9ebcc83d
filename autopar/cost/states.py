"""What one device holds of parameters: their local shapes and storages, and the bytes of all that belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.graph import DTYPE_BYTES, local_shape
from autopar.plan import DtypePolicy
from autopar.shard.program import Program
from autopar.shard.storage import Axes, ParameterStorage, dealt_shape, parameter_storage

STATE_BYTES: Mapping[str, int | None] = {"adamw": None, "adam": None, "sgd": 0, "adafactor": 0, "adamw8bit": 2}
"""Bytes of optimizer state per parameter; None, as for optimizers not named here: two in `policy.states`."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter on one device.

    `shape`: of the shard that layers compute with, in `dtype`; `stored`: of the largest part of it that a rank stores.
    """

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: str
    trained: bool
    storage: ParameterStorage


@dataclass(frozen=True)
class StateBytes:
    """Bytes held: of parameters with their copies, of gradients from their making to the step, of optimizer states."""

    parameters: float
    gradients: float
    optimizer: float


def held_parameters(
    program: Program, data_axes: Axes, zero: int, foreign: frozenset[str] = frozenset()
) -> list[HeldParameter]:
    """The parameters of a lowered layer, those another layer owns (`foreign`: tied ones) left out."""
    found = []
    for name in program.params:
        if name not in foreign:
            spec, layout = program.values[name], program.layouts[name]
            storage = parameter_storage(spec, layout, data_axes, zero)
            shape = local_shape(spec.shape_at(1), layout, program.axis_sizes)
            stored = dealt_shape(shape, storage.ways(program.axis_sizes))
            found.append(HeldParameter(shape, stored, spec.dtype, spec.requires_grad, storage))
    return found


def parameter_bytes(parameter: HeldParameter, policy: DtypePolicy, optimizer: str) -> StateBytes:
    """Bytes of one parameter."""
    return state_bytes(
        prod(parameter.shape), prod(parameter.stored), parameter.storage.zero, parameter.trained,
        parameter.dtype, policy, optimizer,
    )  # fmt: skip


def state_bytes(
    whole: float, stored: float, zero: int, trained: bool, dtype: str, policy: DtypePolicy, optimizer: str
) -> StateBytes:
    """Bytes of `whole` elements that layers compute with in `dtype`, of which this rank stores `stored`.

    Beside what is stored there are copies to compute with all the time where it is gathered or cast once a step (ZeRO
    0 and 1) or kept gathered (2). Gradients are whole until they are reduced: once a step, or (2, 3) at once.
    """
    copies = zero in (1, 2) or (zero == 0 and dtype != policy.parameters)
    parameters = stored * DTYPE_BYTES[policy.parameters] + (whole * DTYPE_BYTES[dtype] if copies else 0)
    if not trained:
        return StateBytes(parameters, 0, 0)
    gradients = (whole if zero < 2 else stored) * DTYPE_BYTES[policy.gradients]
    return StateBytes(parameters, gradients, stored * _optimizer_bytes(optimizer, policy))


def _optimizer_bytes(optimizer: str, policy: DtypePolicy) -> int:
    known = STATE_BYTES.get(optimizer)
    return 2 * DTYPE_BYTES[policy.states] if known is None else known
