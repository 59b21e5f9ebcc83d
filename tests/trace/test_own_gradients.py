"""Gradients that are not the derivative of what forward computes are never lost: see also integration/unusual.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from autopar.trace.opaque.operator import OPAQUE
from tests.integration.unusual import Reversed, Turning
from tests.trace.interpreter import largest_difference

WIDTH = 4


class Scaled(torch.autograd.Function):
    """Squares times a weight, with the derivative written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * x * weight * gradient, (x * x * gradient).sum(0)


class Rounded(Scaled):
    """The same, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() * x.float() * weight.float()).to(x.dtype)


class Calls(nn.Module):
    """A function of a linear layer's output, called in forward itself."""

    def __init__(self, function: Any, *further: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.function, self.further = nn.Linear(WIDTH, WIDTH), function, nn.ParameterList(further)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), *self.further).pow(2).mean()  # type: ignore[no-any-return]


def _inputs() -> tuple[Tensor]:
    return (torch.zeros(2, WIDTH, dtype=torch.float64),)


@pytest.mark.parametrize(("function", "rounding"), [(Scaled, 1e-12), (Rounded, 1e-6)])
def test_a_function_with_the_usual_gradient_is_taken_apart(function: Any, rounding: float) -> None:
    """A function whose backward is the derivative of its forward is traced as its operators; gradients agree."""
    torch.manual_seed(0)
    model = Calls(function.apply, nn.Parameter(torch.randn(WIDTH))).double()
    graph = trace(model, _inputs())
    assert OPAQUE not in {op.target for layer in graph.classes for op in layer.ops}
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert largest_difference(graph, model, {"x": x}, model(x), 3) < rounding


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 3 * gradient)
    return x


class BoundRoot(torch.autograd.Function):
    """A root of what may be negative in a trial, with a gradient that stays below a bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = (4 * x).clamp(min=1e-6).rsqrt()
        return gradients[0] * slope


OTHERS = [(Reversed.apply, "Reversed"), (_hooked, "hook"), (BoundRoot.apply, "BoundRoot")]


@pytest.mark.parametrize(("function", "why"), OTHERS)
def test_others_are_refused_where_nothing_stands_for_them(function: Any, why: str) -> None:
    """In the model's own forward they are an error that names them and the remedy, never a wrong gradient."""
    with pytest.raises(TraceError, match=rf"Calls.*{why}.*submodule of its own"):
        trace(Calls(function).double(), _inputs())


def test_hooks_on_the_gradients_of_a_module() -> None:
    """A module with a hook on its gradient isn't traced as if it had none."""
    model = Calls(nn.Tanh()).double()
    model.function.register_full_backward_hook(lambda _, given, __: (3 * given[0],))
    with pytest.raises(TraceError, match="hook"):
        trace(model, _inputs())


def test_a_submodule_stands_as_one_operator() -> None:
    """A submodule that has a gradient of its own is one operator of the graph, and said to be."""
    model = nn.Sequential(nn.Linear(16, 16), Turning(), nn.Linear(16, 1)).double()
    graph = trace(model, (torch.zeros(2, 16, dtype=torch.float64),), loss_fn=lambda out: out.mean())
    assert [op.module for layer in graph.classes for op in layer.ops if op.target == OPAQUE] == ["1"]
    assert any("hook" in said for said in graph.assumptions)
