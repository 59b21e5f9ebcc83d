"""Results that nobody keeps are made again for whoever wants them, once, and are let go after."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from weakref import ref

import pytest
import torch
from torch import Tensor

from autopar.emit.again import made_again, making_again


class Counted:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        y = torch.tanh(x) * scale
        return y, y.view(-1), x.argmax(-1)


def loss_of(code: Counted, given: Sequence[Tensor], light: bool) -> Tensor:
    x, scale, weight = given
    y, flat, place = made_again(code, x, scale) if light else code(x, scale)
    return (y @ weight).square().sum() + (y.t() @ y).sum() + flat.exp().sum() + place.sum() * 0.0


def inputs() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = ((4, 6), (6,), (6, 3))
    return [torch.randn(s, generator=made, dtype=torch.float64).requires_grad_() for s in shapes]


def test_gradients_are_the_same_and_it_runs_again_once() -> None:
    """Of several that want results (views too), the first has them made; gradients are those of plain autograd."""
    plain, light = inputs(), inputs()
    loss_of(Counted(), plain, light=False).backward()
    code = Counted()
    with making_again():
        loss = loss_of(code, light, light=True)
    loss.backward()
    assert code.calls == 2
    for ours, theirs in zip(light, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_backward_twice() -> None:
    """A graph that is retained gives the same gradients again."""
    x, scale, weight = inputs()
    with making_again():
        loss = loss_of(Counted(), (x, scale, weight), light=True)
    first = torch.autograd.grad(loss, (x, scale, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, scale, weight))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_a_region_that_reads_another_one() -> None:
    """What the second region reads is not kept either: it is made again from the first one's inputs."""
    x = torch.randn(5, 5, dtype=torch.float64).requires_grad_()
    with making_again():
        (first,) = made_again(lambda a: (torch.tanh(a),), x)
        (second,) = made_again(lambda a: (torch.sin(a) * a,), first)
        loss = (second @ second).sum()
    watched = ref(first)
    del first
    gc.collect()
    assert watched() is None
    (found,) = torch.autograd.grad(loss, x)
    y = torch.tanh(x)
    z = torch.sin(y) * y
    torch.testing.assert_close(found, torch.autograd.grad((z @ z).sum(), x)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_stays(backward: bool) -> None:
    """After the backward pass, or when the graph is dropped without one, the inputs kept are let go."""
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 6, dtype=torch.float64)
    with making_again():
        loss = loss_of(Counted(), (x, scale, torch.ones(6, 3, dtype=torch.float64)), light=True)
    watched = ref(x)
    del x
    if backward:
        loss.backward()
    del loss
    assert watched() is None


def test_what_no_gradient_flows_to() -> None:
    """Results of inputs without a gradient are made again, too, and ask for none."""
    mask = torch.ones(3, 3)
    x = torch.randn(3, 3, requires_grad=True)
    with making_again():
        (bias,) = made_again(lambda m: (m.cumsum(0),), mask)
        assert not bias.requires_grad
        loss = (x * bias).sum()
    (found,) = torch.autograd.grad(loss, x)
    assert found.equal(mask.cumsum(0))
