from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost.work import model_flops, passes_gradient, unknown_targets, work
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


EINSUMS = [
    ("bsd,edf->bsef", (3, 5, 7), (2, 7, 11)),
    ("bij,bjk->bik", (3, 5, 7), (3, 7, 11)),
    ("...hd,...td->...ht", (2, 3, 5, 7), (2, 3, 11, 7)),
    ("ij,jk", (5, 7), (7, 11)),
    ("bsef,efd,bse->bsd", (3, 5, 2, 11), (2, 11, 7), (3, 5, 2)),
]


@pytest.mark.parametrize(("equation", "shapes"), [(e, s) for e, *s in EINSUMS])
def test_einsums_equal_torchs_own_count(equation: str, shapes: list[tuple[int, ...]]) -> None:
    """Forward and backward FLOPs of an einsum are those that torch's flop counter sees in a real run."""
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as forward:
        out = torch.einsum(equation, *operands)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    found = work(OpKey("aten.einsum.default", (equation, tuple(tensor(*shape) for shape in shapes))))
    assert found.forward.flops == forward.get_total_flops()
    assert found.backward.flops == backward.get_total_flops()


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


CONVOLUTIONS = [
    ("conv1d.default", (2, 6, 9), (8, 6, 3), (2,), (1,), (1,), 1),
    ("conv2d.default", (2, 6, 9, 7), (8, 3, 3, 2), (2, 1), (1, 0), (1, 2), 2),
    ("conv2d.default", (2, 6, 9, 7), (6, 1, 3, 3), (1, 1), (1, 1), (1, 1), 6),
    ("conv3d.default", (2, 4, 5, 6, 7), (8, 4, 2, 3, 3), (1, 2, 1), (0, 1, 1), (1, 1, 1), 1),
    ("conv_transpose1d.default", (2, 6, 9), (6, 8, 3), (2,), (1,), (1,), 1),
    ("conv_transpose2d.input", (2, 6, 9, 7), (6, 4, 3, 2), (2, 1), (1, 0), (1, 2), 2),
    ("conv_transpose3d.input", (2, 4, 5, 6, 7), (4, 8, 2, 3, 3), (1, 2, 1), (0, 1, 1), (1, 1, 1), 1),
]


@pytest.mark.parametrize("wanted", [(True, True), (False, True)])
@pytest.mark.parametrize(("name", "x", "weight", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
def test_convolutions_equal_torchs_own_count(
    name: str, x: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], groups: int, wanted: tuple[bool, bool],
) -> None:  # fmt: skip
    """Forward and backward FLOPs of convolutions, transposed and grouped ones included, are torch's own count."""
    space: tuple[object, ...] = (stride, padding, dilation, groups)
    if "transpose" in name:
        space = (stride, padding, (0,) * len(stride), groups, dilation)
    tensors = [torch.randn(shape, requires_grad=grad) for shape, grad in zip((x, weight), wanted, strict=True)]
    op, overload = name.split(".")
    with FlopCounterMode(display=False) as forward:
        out = getattr(getattr(torch.ops.aten, op), overload)(*tensors, None, *map(_plain, space))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    operands = [tensor(*shape, grad=grad) for shape, grad in zip((x, weight), wanted, strict=True)]
    found = work(OpKey(f"aten.{name}", (*operands, None, *space)))
    assert found.forward.flops == forward.get_total_flops()
    if groups == 1:
        assert found.backward.flops == backward.get_total_flops()
    else:  # torch counts the gradient of the weight as if there were no groups; each gradient takes as many as forward
        assert found.backward.flops == sum(wanted) * forward.get_total_flops()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


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


def test_unknown_ops_are_named() -> None:
    """An op without a formula that is no elementwise one either is named, once; it is priced by its bytes."""
    layer = feed_forward()
    strange = replace(layer.ops[1], target="mylib.sort_of.default")
    changed = replace(layer, ops=(layer.ops[0], strange, strange, *layer.ops[2:]))
    graph = OpGraph((changed,), (), (), (), {}, {}, {}, {})
    assert unknown_targets(graph) == ["mylib.sort_of.default"]
    assert unknown_targets(replace(graph, classes=(layer,))) == []
    assert work(OpKey("mylib.sort_of.default", (tensor(10, 20),))).forward.bytes == 2 * 800
