from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost.work import model_flops, passes_gradient, work
from autopar.graph import Cut, Dtype, Layer, Operand, OpGraph, OpKey
from tests.cost.small import HIDDEN, ROWS, WIDTH, feed_forward


def tensor(*shape: int, grad: bool = True, dtype: str = "float32") -> Operand:
    return Operand(shape, dtype, grad)


PRODUCTS = [
    OpKey("aten.linear.default", (tensor(3, 5, 7), tensor(11, 7), tensor(11))),
    OpKey("aten.linear.default", (tensor(3, 5, 7, grad=False), tensor(11, 7))),
    OpKey("aten.addmm.default", (tensor(11), tensor(5, 7), tensor(7, 11))),
    OpKey("aten.mm.default", (tensor(5, 7), tensor(7, 11))),
    OpKey("aten.bmm.default", (tensor(3, 5, 7), tensor(3, 7, 11))),
    OpKey("aten.matmul.default", (tensor(2, 3, 5, 7), tensor(2, 3, 7, 11))),
    OpKey("aten.matmul.default", (tensor(2, 3, 5, 7), tensor(7, 11))),
]


@pytest.mark.parametrize("key", PRODUCTS, ids=lambda k: f"{k.target}-{len(k.args[0].shape)}")
def test_products_equal_torchs_own_count(key: OpKey) -> None:
    """Forward and backward FLOPs of matrix products are those that torch's flop counter sees in a real run."""
    args = [torch.randn(a.shape, requires_grad=a.requires_grad) for a in key.args]  # type: ignore[attr-defined]
    name = key.target.split(".")[1]
    function = torch.nn.functional.linear if name == "linear" else getattr(torch, name)
    with FlopCounterMode(display=False) as forward:
        out = function(*args)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    found = work(key)
    assert found.forward.flops == forward.get_total_flops()
    assert found.backward.flops == backward.get_total_flops()


def test_causal_attention_counts_half() -> None:
    """Two products of 2 b h s s d FLOPs, halved when causal; five in the backward pass."""
    q = tensor(2, 3, 16, 8)
    full = work(OpKey("aten.scaled_dot_product_attention.default", (q, q, q)))
    causal = work(OpKey("aten.scaled_dot_product_attention.default", (q, q, q, None, 0.0, True)))
    assert full.forward.flops == 2 * 2 * 2 * 3 * 16 * 16 * 8
    assert causal.forward.flops == full.forward.flops / 2
    assert causal.backward.flops == 2.5 * causal.forward.flops
    named = OpKey("aten.scaled_dot_product_attention.default", (q, q, q), (("is_causal", True),))
    assert work(named) == causal


def test_bytes_of_simple_ops() -> None:
    """What each kernel must read and write, counted by hand, in bytes."""
    x, row = tensor(10, 20), tensor(20)
    assert work(OpKey("aten.relu.default", (x,))).forward.bytes == 2 * 800
    assert work(OpKey("aten.mul.Tensor", (x, x))).forward.bytes == 3 * 800
    assert work(OpKey("aten.mul.Tensor", (x, row))).forward.bytes == 2 * 800 + 80
    assert work(OpKey("aten.add.Tensor", (x, x))).backward.bytes == 0
    assert work(OpKey("aten.add.Tensor", (x, row))).backward.bytes == 800
    assert work(OpKey("aten.to.dtype", (x, Dtype("bfloat16")))).forward.bytes == 800 + 400
    assert work(
        OpKey("aten.embedding.default", (tensor(50, 20), tensor(10, grad=False, dtype="int64")))
    ).forward.bytes == (2 * 800 + 80)


def test_nothing_is_done_backward_without_a_gradient() -> None:
    """No operand wants a gradient: no backward work."""
    assert work(OpKey("aten.mul.Tensor", (tensor(4, grad=False),) * 2)).backward.bytes == 0


def test_gradients_that_pass_through() -> None:
    """Views and sums hand the gradient on; products and slices make a new one."""
    assert all(passes_gradient(f"aten.{name}.default") for name in ("view", "transpose", "add", "cat"))
    assert not any(passes_gradient(f"aten.{name}.default") for name in ("mul", "slice", "expand", "linear"))


def test_model_flops_are_three_times_the_forward() -> None:
    """Two layers of two products each: 3 * 2 * 2 * 2 * tokens * hidden * width."""
    layers = tuple(Layer(f"l{i}", 0, (f"x{i}",), (f"x{i + 1}",), ("up", "down"), ()) for i in range(2))
    graph = OpGraph((feed_forward(),), layers, (Cut("x0", ("x0",)),) * 3, (), {}, {}, {}, {})
    assert model_flops(graph, 5) == 3 * 2 * 2 * 2 * (5 * ROWS) * HIDDEN * WIDTH
