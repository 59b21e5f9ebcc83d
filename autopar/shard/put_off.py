"""Gradients of weights that can be made apart from those of activations: what a split backward pass puts off."""

from __future__ import annotations

from typing import NamedTuple

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


def product_with_weight(call: Call, program: Program) -> Roles | None:
    """The roles of a call's operands if it multiplies by a parameter of two dims whose gradient can be put off."""
    roles = _PRODUCTS.get(call.op.target)
    if roles is None or call.kernel or call.op.kwargs:
        return None
    if roles.bias >= len(call.operands):
        roles = roles._replace(bias=-1)
    dims = [len(program.values[name].shape) for name in call.operands]
    weight = call.operands[roles.weight]
    fits = dims[roles.x] > 1 and dims[roles.weight] == 2 and (roles.bias < 0 or dims[roles.bias] == 1)
    return roles if fits and weight in program.params and program.values[weight].requires_grad else None
