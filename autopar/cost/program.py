"""The price of a lowered layer: the sum of its calls and layout changes, as the search's tables have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost.demand import Demand, price_demands
from autopar.cost.moves import collective_key, relayout_demand
from autopar.cost.passes import tensor_arguments
from autopar.cost.pricer import Pricer, Source
from autopar.cost.work import is_view
from autopar.graph import DTYPE_BYTES, LayerClass, Op, Operand, OpKey
from autopar.plan import MeshAxis
from autopar.shard.localize import op_key
from autopar.shard.program import Call, Program, Relayout
from autopar.shard.put_off import is_product
from autopar.shard.rules import inner_collectives, inner_collectives_backward
from autopar.shard.saved import run_again


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer and microbatch on one device, its collectives fully exposed.

    `compute_s` and `communication_s` split the sum of both passes by kind, `by_source` by where the seconds come from.
    """

    forward_s: float
    backward_s: float
    compute_s: float
    communication_s: float
    by_source: dict[Source, float]


def price(program: Program, layer: LayerClass, batch: int, mesh: Sequence[MeshAxis], pricer: Pricer) -> LayerCost:
    """Price a lowered layer at a global microbatch of `batch` samples (without recomputation and synchronisation)."""
    times = price_demands([layer_demand(program, layer, batch, mesh)], pricer)
    compute = times.forward_compute_s + times.backward_compute_s
    communication = times.forward_communication_s + times.backward_communication_s
    return LayerCost(
        float(times.forward_s[0]),
        float(times.backward_s[0]),
        float(compute[0]),
        float(communication[0]),
        {source: float(seconds[0]) for source, seconds in times.by_source.items()},
    )


def layer_demand(program: Program, layer: LayerClass, batch: int, mesh: Sequence[MeshAxis]) -> Demand:
    """Demand of all steps of a lowered layer, nothing run again."""
    return Demand.joined(step_demands(program, layer, batch, mesh))


def weights_alone(calls: Demand) -> tuple[Demand, Demand]:
    """Products whose backward pass makes gradients of weights alone, and those where these are half of its FLOPs.

    Told by operands that want a gradient: the last of two dims that a product has counts as a weight.
    """
    found: tuple[list[OpKey], list[OpKey]] = ([], [])
    for key in calls.ops:
        if is_product(key.target):
            *others, weight = [o for o in tensor_arguments(key) if len(o.shape) > 1]
            if others and weight.requires_grad and len(weight.shape) == 2:
                found[others[0].requires_grad].append(key)
    return Demand(ops=tuple(found[0])), Demand(ops=tuple(found[1]))


def rerun_of(program: Program, demands: Sequence[Demand]) -> Demand:
    """Of the demands of a program's steps those of what runs again in the backward pass."""
    again = [demands[i] for region in program.regions for i in run_again(region, program.steps, program.light)]
    return Demand.joined(again).forward_alone


def step_demands(
    program: Program,
    layer: LayerClass,
    batch: int,
    mesh: Sequence[MeshAxis],
    of_call: Callable[[Call], Demand] | None = None,
) -> list[Demand]:
    """Demand of each step of a lowered layer; `of_call` knows that of calls."""
    parts = []
    for step in program.steps:
        if isinstance(step, Relayout):
            spec = program.values[step.source]
            parts.append(relayout_demand(spec, step.from_layout, step.to_layout, mesh, batch))
        else:
            parts.append(of_call(step) if of_call else call_demand(step, program, layer, batch, mesh))
    return parts


def call_demand(call: Call, program: Program, layer: LayerClass, batch: int, mesh: Sequence[MeshAxis]) -> Demand:
    """Demand of one op on local shards, with what its kernel communicates inside.

    An operand that is read again later already has a gradient when this op's comes: the two are added. Of `program`
    only specs and mesh are used: the layouts are those of the call, which need not be part of it.
    """
    inner, inner_backward = (
        tuple(collective_key(kind, prod(shape) * DTYPE_BYTES[dtype], axes, mesh) for kind, axes, shape, dtype in found)
        for found in (inner_collectives(call, program, batch), inner_collectives_backward(call, program, batch))
    )
    key = op_key(call, program, batch)
    added = tuple(
        OpKey("aten.add_.Tensor", (Operand(operand.shape, operand.dtype, False),) * 2)
        for name, operand in zip(call.op.operands, tensor_arguments(key), strict=True)
        if operand.requires_grad and _is_read_later(name, call.op, layer)
    )
    if is_view(key.target) and not any(call.op.alias_of):  # strides that no view can express: it copies
        key = OpKey("aten.clone.default", tuple(tensor_arguments(key)[:1]))
    return Demand(ops=(key,), backward_ops=added, forward_collectives=inner, backward_collectives=inner_backward)


def _is_read_later(name: str, op: Op, layer: LayerClass) -> bool:
    return name in layer.outputs or layer.consumers[name][-1].name != op.name
