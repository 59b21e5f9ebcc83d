"""Rules that users give."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from autopar.shard.table import RULES
from autopar.trace.capture import trace


@pytest.fixture(scope="module", autouse=True)
def mixed() -> str:
    """An operator of the tests' own: a product that also shifts."""

    @torch.library.custom_op("autopar_tests::mixed", mutates_args=())
    def mixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight.T)

    @mixed.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T

    def backward(context, gradient):  # type: ignore[no-untyped-def]
        x, weight, out = context.saved_tensors
        inner = gradient * (out > 0)
        return inner @ weight, inner.T @ x

    def keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs, output)

    mixed.register_autograd(backward, setup_context=keep)
    return "autopar_tests::mixed"


def test_right_rule_is_kept(mixed: str) -> None:
    """A rule under which sharded equals unsharded is registered."""
    autopar.register_rule(mixed, "b _, n _ -> b n")
    assert RULES[mixed.replace("::", ".")] == "b _, n _ -> b n"


def test_a_rule_says_whether_samples_stay_apart(mixed: str) -> None:
    """They do where a factor stands for them in operand and result, not where their dim may not be split."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = torch.ops.autopar_tests.mixed(x, self.weight).square().mean()
            return loss

    for line, apart in (("b _, n _ -> b n", True), ("_ _, n _ -> _ n", False)):
        autopar.register_rule(mixed, line)
        assert trace(Model(), (torch.zeros(2, 4),)).separable == apart


def test_wrong_rule_is_refused(mixed: str) -> None:
    """Splitting the inner dim of a product with a nonlinear end gives another result: refused, nothing registered."""
    before = dict(RULES)
    with pytest.raises(ConfigError, match="mixed"):
        autopar.register_rule(mixed, "b k, n k -> b n")
    assert before == RULES
