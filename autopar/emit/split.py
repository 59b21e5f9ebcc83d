"""The backward pass in two halves: products with weights make the gradient of their input, and of the weight later.

As proposed by Qi et al., "Zero bubble pipeline parallelism" (2023). Only the operand and the gradient of each product
wait, so that what else autograd keeps is let go with the first half, recomputed regions run once, and weights need not
be gathered for the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.shard.put_off import Roles

Make = Callable[[], Tensor]


class WeightGradients:
    """Gradients of leaves that the backward pass puts off while `on`."""

    def __init__(self) -> None:
        self.on = False
        self._waiting: list[tuple[Tensor, Make]] = []

    def of(self, leaf: Tensor, make: Make) -> Tensor | None:
        """The gradient that `make` makes; None where it is put off."""
        if not (self.on and leaf.is_leaf):
            return make()
        self._waiting.append((leaf, make))
        return None

    def take(self) -> Callable[[], None]:
        """What makes and accumulates all that was put off since the last call."""
        waiting, self._waiting = self._waiting, []

        def run() -> None:
            while waiting:
                leaf, make = waiting.pop()
                torch.autograd.backward([leaf], [make()])  # hooks of the leaf run as in any backward pass

        return run


class SplitProduct(nn.Module):
    """A product with a weight, `operation` on operands in these roles, whose weight's gradient can be put off."""

    def __init__(self, operation: Any, roles: Roles, gradients: WeightGradients) -> None:
        super().__init__()
        self._given = operation, roles, gradients

    def forward(self, *operands: Tensor) -> Tensor:
        """The product."""
        made: Tensor = _Product.apply(*self._given, *operands)  # type: ignore[no-untyped-call]
        return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Any, roles: Roles, gradients: WeightGradients, *operands: Tensor) -> Tensor:
        ctx.roles, ctx.gradients = roles, gradients
        ctx.leaves = {i: operands[i] for i in (roles.weight, roles.bias) if i >= 0}
        ctx.save_for_backward(operands[roles.x], operands[roles.weight])
        return operation(*operands)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight), roles = arriving, ctx.saved_tensors, ctx.roles
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[3:]

        def for_weight() -> Tensor:
            left, right = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            made: Tensor = left.t() @ right if roles.turned else right.t() @ left
            return made

        if wanted[roles.x]:
            found[3 + roles.x] = gradient @ (weight if roles.turned else weight.t())
        if wanted[roles.weight]:
            found[3 + roles.weight] = ctx.gradients.of(ctx.leaves[roles.weight], for_weight)
        if roles.bias >= 0 and wanted[roles.bias]:
            make = lambda: gradient.reshape(-1, gradient.shape[-1]).sum(0)  # noqa: E731
            found[3 + roles.bias] = ctx.gradients.of(ctx.leaves[roles.bias], make)
        return tuple(found)
