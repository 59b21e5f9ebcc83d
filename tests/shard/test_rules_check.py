"""A rule registered for an op of one's own is tried before it is believed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import ConfigError
from autopar.shard.check import check_rule


@torch.library.custom_op("autopar_test::centred_product", mutates_args=())
def centred_product(x: Tensor, w: Tensor) -> Tensor:
    """`(x - mean over its last dim) @ w`: the last dim of x can't be split, all others can."""
    return (x - x.mean(-1, keepdim=True)) @ w


@centred_product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[-1]))


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors  # type: ignore[attr-defined]
    centred = x - x.mean(-1, keepdim=True)
    inner = grad @ w.T
    return inner - inner.mean(-1, keepdim=True), centred.flatten(0, -2).T @ grad.flatten(0, -2)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


centred_product.register_autograd(_backward, setup_context=_save)


@pytest.mark.parametrize("line", ["b s _, _ n -> b s n", "... _, _ n -> ... n"])
def test_right_rule_passes(line: str) -> None:
    """A rule that holds is accepted, on operands made from the line alone."""
    check_rule("autopar_test::centred_product", line)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("b s k, k n -> b s n", "factors \\('k',\\).*differs from the whole one in result 0, gradient of operand 0"),
        ("b s _, _ _ -> s b _", "differs from the whole one in what it can run on"),
    ],
)
def test_wrong_rule_is_refused(line: str, fault: str) -> None:
    """A rule that does not hold is refused with the split that shows it, values and gradients being looked at."""
    with pytest.raises(ConfigError, match=fault):
        check_rule("autopar_test::centred_product", line)


@torch.library.custom_op("autopar_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Twice x, which must have a row."""
    if not len(x):
        raise RuntimeError("no rows")
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_uneven_splits_are_tried() -> None:
    """An operator that fails where a rank has nothing needs a rule that says so, which is then kept to."""
    with pytest.raises(ConfigError, match="can't be differentiated"):
        check_rule("autopar_test::doubled", "b _ -> b _")
    doubled.register_autograd(lambda _, gradient: gradient * 2)
    with pytest.raises(ConfigError, match=r"shapes \(7, 3\), .*no rows.*'| name!'"):
        check_rule("autopar_test::doubled", "b _ -> b _")
    check_rule("autopar_test::doubled", "b _ -> b _ | b!")


def test_example_call() -> None:
    """An op that takes more than real tensors is tried on a given call."""
    table, rows = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 4
    check_rule("aten::index_select", "_ c, r -> r c", (table, 0, rows))
    with pytest.raises(ConfigError, match="can't be called"):
        check_rule("aten::index_select", "_ c, r -> r c")


def test_line_without_places() -> None:
    """A line with fewer dims than the operands have is refused with their shapes."""
    with pytest.raises(ConfigError, match="no place for operands of shapes"):
        check_rule("aten::neg", "b -> b", (torch.randn(2, 3, dtype=torch.float64),))
