"""The demand of keeping things in the host's memory: copies there and back, and optimizer steps there."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cost.demand import Demand
from autopar.cost.moved import HOST_PASSES
from autopar.graph import DTYPE_BYTES, Operand, OpKey
from autopar.plan import DtypePolicy

OFFLOAD = "autopar.offload.default"
"""Copied to the host in the forward pass, and back in the backward (`shard/host.py`)."""
WORD = 4
"""Bytes of the elements in which copies are counted."""


def saved_demand(sizes: Iterable[int]) -> Demand:
    """What is saved for the backward pass goes in the forward pass and comes back: so many bytes of each storage."""
    return Demand(ops=tuple(_copy(size) for size in sizes))


def step_demand(elements: Iterable[int], policy: DtypePolicy, optimizer: str) -> Demand:
    """Once a step, for parameters of which this device updates so many elements: gradients go to the host, which takes
    the optimizer's step, and parameters come back."""
    name = optimizer if optimizer in HOST_PASSES else "adamw"
    keys: list[OpKey] = []
    for count in filter(None, elements):
        keys += [_copy(count * DTYPE_BYTES[policy.gradients]), _copy(count * DTYPE_BYTES[policy.compute])]
        keys.append(OpKey(f"autopar.host_step.{name}", (Operand((count,), policy.states, False),)))
    return Demand(forward_ops=tuple(keys))


def _copy(size_bytes: int) -> OpKey:
    return OpKey(OFFLOAD, (Operand((-(-size_bytes // WORD),), "float32", True),))
