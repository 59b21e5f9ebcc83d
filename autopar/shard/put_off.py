"""Gradients of weights that can be made apart from those of activations: what a split backward pass puts off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from autopar.graph import LayerClass, Op, TensorSpec
from autopar.shard.program import Call, Program


class Roles(NamedTuple):
    """Positions among the operands of a product with a weight; no bias is -1. `turned`: the weight is (n, k)."""

    x: int
    weight: int
    bias: int
    turned: bool


_PRODUCTS = {
    "aten.linear.default": Roles(0, 1, 2, True),
    "aten.addmm.default": Roles(1, 2, 0, False),
    "aten.mm.default": Roles(0, 1, -1, False),
    "aten.matmul.default": Roles(0, 1, -1, False),
}


def is_product(target: str) -> bool:
    """Whether an op multiplies by what can be a weight."""
    return target in _PRODUCTS


def product_with_weight(call: Call, program: Program) -> Roles | None:
    """The roles of a call's operands if it multiplies by a parameter of two dims whose gradient can be put off."""
    return None if call.kernel else _roles(call.op, call.operands, program.params, program.values)


def params_put_off(program: Program) -> frozenset[str]:
    """Parameters that products alone read, as weights or biases: all of their gradients can be put off."""
    elsewhere: set[str] = set()
    found: set[str] = set()
    for step in program.steps:
        roles = product_with_weight(step, program) if isinstance(step, Call) else None
        late = () if roles is None else (roles.weight, *([roles.bias] if roles.bias >= 0 else []))
        read = step.operands if isinstance(step, Call) else (step.source,)
        found |= {read[i] for i in late}
        elsewhere |= {name for i, name in enumerate(read) if i not in late}
    return frozenset(name for name in program.params if name in found - elsewhere)


def most_put_off(op: Op, layer: LayerClass) -> float:
    """The largest share of an op's backward pass that can be put off: 1 where only its weight wants a gradient."""
    roles = _roles(op, op.operands, layer.params, layer.values)
    return 0.0 if roles is None else 0.5 if layer.values[op.operands[roles.x]].requires_grad else 1.0


def _roles(
    op: Op, operands: tuple[str, ...], params: tuple[str, ...], values: Mapping[str, TensorSpec]
) -> Roles | None:
    roles = _PRODUCTS.get(op.target)
    if roles is None or op.kwargs:
        return None
    if roles.bias >= len(operands):
        roles = roles._replace(bias=-1)
    dims = [len(values[name].shape) for name in operands]
    fits = dims[roles.x] > 1 and dims[roles.weight] == 2 and (roles.bias < 0 or dims[roles.bias] == 1)
    weight = operands[roles.weight]
    return roles if fits and weight in params and values[weight].requires_grad else None
