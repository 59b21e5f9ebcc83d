"""Every rule, run on simulated shards under all its legal assignments, against the op run whole (float64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.shard.check import capture, differences
from autopar.shard.rules import assignments, rule_for

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
COMMUNICATING = ("cross_entropy", "dropout")
"""Kernels that need real processes, or state, and are tested there."""

_generator = torch.Generator().manual_seed(0)


def _reals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def _positive(*shape: int) -> Tensor:
    return _reals(*shape).abs() + 0.5


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def _truth(*shape: int) -> Tensor:
    return _reals(*shape) > 0


CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    # target, arguments, keywords, the factors that must be on offer
    ("linear", (_reals(4, 6, 8), _reals(12, 8), _reals(12)), {}, "d0 d1 k n"),
    ("linear", (_reals(4, 8), _reals(6, 8)), {}, "d0 k n"),
    ("mm", (_reals(4, 6), _reals(6, 8)), {}, "m k n"),
    ("bmm", (_reals(4, 6, 3), _reals(4, 3, 8)), {}, "b m k n"),
    ("addmm", (_reals(12), _reals(4, 6), _reals(6, 12)), {"beta": 0.5, "alpha": 2.0}, "m k n"),
    ("addmm", (_reals(4, 1), _reals(4, 6), _reals(6, 12)), {}, "m k n"),
    ("baddbmm", (_reals(4, 2, 6), _reals(4, 2, 8), _reals(4, 8, 6)), {}, "b m k n"),
    ("matmul", (_reals(4, 6, 2, 8), _reals(6, 8, 4)), {}, "d0 d1 m k n"),
    ("matmul", (_reals(4, 6, 8), _reals(8)), {}, "d0 m k"),
    ("matmul", (_reals(8), _reals(6, 8, 4)), {}, "d0 k n"),
    ("matmul", (_reals(8), _reals(8)), {}, "k"),
    ("mv", (_reals(4, 8), _reals(8)), {}, "m k"),
    ("dot", (_reals(8), _reals(8)), {}, "k"),
    ("outer", (_reals(8), _reals(6)), {}, "m n"),
    ("einsum", ("bsk,nk->bsn", (_reals(4, 6, 8), _reals(12, 8))), {}, "b s k n"),
    ("einsum", ("sk,kn", (_reals(6, 8), _reals(8, 12))), {}, "k n s"),
    ("einsum", ("...hd,...td->...ht", (_reals(4, 6, 2), _reals(4, 3, 2))), {}, "d0 h t d"),
    ("conv2d", (_reals(4, 6, 5, 5), _reals(8, 6, 3, 3), _reals(8)), {}, "b i o"),
    ("conv2d", (_reals(4, 6, 5, 5), _reals(8, 3, 3, 3), _reals(8), [1, 1], [0, 0], [1, 1], 2), {}, "b"),
    ("conv2d.padding", (_reals(4, 6, 5, 5), _reals(8, 6, 3, 3), None, [1, 1], "same"), {}, "b i o"),
    ("conv1d", (_reals(4, 6, 9), _reals(8, 6, 3), _reals(8), [2]), {}, "b i o"),
    ("conv_transpose2d.input", (_reals(4, 6, 5, 5), _reals(6, 8, 3, 3), _reals(8), [2, 2]), {}, "b i o"),
    ("max_pool2d", (_reals(4, 6, 4, 4), [2, 2]), {}, "d0 d1"),
    ("max_pool2d_with_indices", (_reals(4, 6, 4, 4), [2, 2]), {}, "d0 d1"),
    ("avg_pool1d", (_reals(4, 6, 8), [2]), {}, "d0 d1"),
    ("adaptive_avg_pool2d", (_reals(4, 6, 4, 4), [1, 1]), {}, "d0 d1"),
    ("upsample_nearest2d.vec", (_reals(4, 6, 4, 4), [8, 8], None), {}, "d0 d1"),
    ("group_norm", (_reals(4, 6, 2, 2), 2, _reals(6), _reals(6)), {}, "b"),
    ("instance_norm", (_reals(4, 6, 9), _reals(6), _reals(6), None, None, True, 0.1, 1e-5, False), {}, "b c"),
    ("layer_norm", (_reals(4, 6, 8), [8], _reals(8), _reals(8)), {}, "d0 d1"),
    ("layer_norm", (_reals(4, 6, 8), [6, 8], _reals(6, 8)), {}, "d0"),
    ("rms_norm", (_reals(4, 6, 8), [8], _reals(8)), {}, "d0 d1"),
    ("native_layer_norm", (_reals(4, 6, 8), [8], None, None, 1e-5), {}, "d0 d1"),
    ("softmax.int", (_reals(4, 6, 8), -1), {}, "d0 d1"),
    ("log_softmax.int", (_reals(4, 6, 8), 1), {}, "d0 d2"),
    ("scaled_dot_product_attention", (_reals(4, 6, 5, 3),) * 3, {"is_causal": True}, "d0 d1 q"),
    ("scaled_dot_product_attention", (_reals(4, 6, 4, 3), *(_reals(4, 6, 5, 3),) * 2), {"is_causal": True}, "d0 d1"),
    ("scaled_dot_product_attention", (_reals(4, 6, 4, 3), _reals(4, 6, 5, 3), _reals(4, 6, 5, 3)), {}, "d0 d1 q"),
    (
        "scaled_dot_product_attention",
        (_reals(4, 12, 4, 3), _reals(4, 6, 4, 3), _reals(4, 6, 4, 3), _truth(4, 1, 4, 4) | torch.eye(4).bool()),
        {"enable_gqa": True},
        "d0 d1 q",
    ),
    (
        "scaled_dot_product_attention",
        (_reals(4, 6, 4, 3), _reals(4, 1, 4, 3), _reals(4, 1, 4, 3), _reals(4, 4)),
        {"enable_gqa": True},
        "d0 d1 q",
    ),
    ("embedding", (_reals(10, 8), _whole(10, 4, 6), 3), {}, "v d d0 d1"),
    ("one_hot", (_whole(5, 4, 6), 5), {}, "d0 d1"),
    ("dropout", (_reals(4, 6), 0.0, True), {}, "d0 d1"),
    ("dropout", (_reals(4, 6), 0.5, False), {}, "d0 d1"),
    ("cross_entropy_loss", (_reals(12, 5), _whole(5, 12), None, 0), {}, "n v"),
    ("cross_entropy_loss", (_reals(12, 5), _whole(5, 12), None, 2, 1, 0.1), {}, "n"),
    ("cross_entropy_loss", (_reals(4, 5, 6), _whole(5, 4, 6), None, 2, 1), {}, "n v n1"),
    ("nll_loss", (_reals(12, 5), _whole(5, 12), None, 2), {}, "n"),
    ("nll_loss_nd", (_reals(12, 5), _whole(5, 12), None, 0, 3), {}, "n"),
    ("mse_loss", (_reals(4, 6), _reals(4, 6), 2), {}, "d0 d1"),
    ("mse_loss", (_reals(4, 6), _reals(4, 6), 0), {}, "d0 d1"),
    ("l1_loss", (_reals(4, 6), _reals(4, 6), 2), {}, "d0 d1"),
    ("mse_loss", (_reals(4, 6), _reals(4, 6)), {}, "d0 d1"),
    ("huber_loss", (_reals(4, 6), _reals(4, 6), 1, 0.5), {}, "d0 d1"),
    ("binary_cross_entropy_with_logits", (_reals(4, 6), _positive(4, 6), None, None, 1), {}, "d0 d1"),
    ("add.Tensor", (_reals(4, 6, 8), _reals(8)), {"alpha": 0.5}, "d0 d1 d2 +"),
    ("add.Tensor", (_reals(4, 6), 2.0), {}, "d0 d1"),
    ("sub.Tensor", (_reals(4, 1, 8), _reals(6, 1)), {}, "d0 d1 d2 +"),
    ("mul.Tensor", (_reals(4, 6), _reals(4, 1)), {}, "d0 d1"),
    ("mul.Tensor", (_reals(4, 6), 3.0), {}, "d0 d1 +"),
    ("div.Tensor", (_reals(4, 6), 3.0), {}, "d0 d1 +"),
    ("div.Tensor_mode", (_reals(4, 6), 3.0), {"rounding_mode": "floor"}, "d0 d1"),
    ("div.Tensor", (_reals(4, 6), _positive(6)), {}, "d0 d1"),
    ("neg", (_reals(4, 6),), {}, "d0 d1 +"),
    ("gelu", (_reals(4, 6),), {"approximate": "tanh"}, "d0 d1"),
    ("silu", (_reals(4, 6),), {}, "d0 d1"),
    ("rsqrt", (_positive(4, 6),), {}, "d0 d1"),
    ("pow.Tensor_Scalar", (_reals(4, 6), 2), {}, "d0 d1"),
    ("where.self", (_truth(4, 1, 6), _reals(4, 8, 6), _reals(6)), {}, "d0 d1 d2"),
    ("masked_fill.Scalar", (_reals(4, 6), _truth(6), -1.0), {}, "d0 d1"),
    ("maximum", (_reals(4, 6), _reals(4, 6)), {}, "d0 d1"),
    ("max.other", (_reals(4, 6), _reals(4, 6)), {}, "d0 d1"),
    ("le.Tensor", (_reals(4, 6), _reals(4, 1)), {}, "d0 d1"),
    ("__and__.Tensor", (_truth(4, 6), _truth(6)), {}, "d0 d1"),
    ("to.dtype", (_reals(4, 6), torch.float32), {}, "d0 d1"),
    ("to.dtype", (_reals(4, 6), torch.float64, False, True), {}, "d0 d1 +"),
    ("clone", (_reals(4, 6),), {}, "d0 d1 +"),
    ("full_like", (_reals(4, 6), 2.0), {}, "d0 d1"),
    ("expand", (_reals(4, 1, 8), [6, 4, 4, 8]), {}, "d0 d1 d2 d3 +"),
    ("mean.dim", (_reals(4, 6, 8), [-1], True), {}, "d0 d1 d2 +"),
    ("sum.dim_IntList", (_reals(4, 6, 8), [0, 2]), {}, "d0 d1 d2 +"),
    ("sum", (_reals(4, 6),), {}, "d0 d1 +"),
    ("sum", (_whole(9, 4, 6),), {}, "d0 d1"),
    ("amax", (_reals(4, 6, 8), [1]), {}, "d0 d2"),
    ("max.dim", (_reals(4, 6, 8), 1, True), {}, "d0 d2"),
    ("argmax", (_reals(4, 6), 1), {}, "d0"),
    ("any.dim", (_truth(4, 6), 1), {}, "d0"),
    ("var.correction", (_reals(4, 6, 8), [2]), {"correction": 0, "keepdim": True}, "d0 d1"),
    ("std", (_reals(4, 6), True), {}, ""),
    ("linalg_vector_norm", (_reals(4, 6, 8), 2, [1]), {}, "d0 d2"),
    ("logsumexp", (_reals(4, 6), [1]), {}, "d0"),
    ("cumsum", (_reals(4, 6), -1), {}, "d0"),
    ("sort", (_reals(4, 6), 0), {}, "d1"),
    ("topk", (_reals(4, 6), 2), {}, "d0"),
    ("flip", (_reals(4, 6, 8), [0, 1]), {}, "d2"),
    ("roll", (_reals(4, 6, 8), [1], [1]), {}, "d0 d2"),
    ("diff", (_whole(9, 4, 6), 1, -1, _whole(9, 4, 1)), {}, "d0"),
    ("view", (_reals(4, 6, 8), [4, 6, 4, 2]), {}, "d0 d1 d2 +"),
    ("view", (_reals(4, 6, 8), [24, 8]), {}, "d0 d2 +"),
    ("reshape", (_reals(4, 6, 8), [4, 48]), {}, "d0 d1 +"),
    ("reshape", (_reals(6, 2), [4, 3]), {}, "d0 +"),
    ("_unsafe_view", (_reals(4, 1, 6), [4, 6, 1]), {}, "d0 d2 +"),
    ("flatten.using_ints", (_reals(4, 6, 8), 1), {}, "d0 d1 +"),
    ("unflatten.int", (_reals(4, 12), 1, [6, 2]), {}, "d0 d1 +"),
    ("unsqueeze", (_reals(4, 6), 1), {}, "d0 d1 +"),
    ("squeeze.dim", (_reals(4, 1, 6), 1), {}, "d0 d2 +"),
    ("transpose.int", (_reals(4, 6, 8), 1, -1), {}, "d0 d1 d2 +"),
    ("t", (_reals(4, 6),), {}, "d0 d1 +"),
    ("permute", (_reals(4, 6, 8), [2, 0, -2]), {}, "d0 d1 d2 +"),
    ("slice.Tensor", (_reals(4, 6), 1, 1, 5), {}, "d0 +"),
    ("slice.Tensor", (_reals(4, 6), 1, 0, 2**63 - 1), {}, "d0 d1 +"),
    ("select.int", (_reals(4, 6, 8), 1, 2), {}, "d0 d2 +"),
    ("unbind.int", (_reals(3, 4, 6),), {}, "d1 d2 +"),
    ("split.Tensor", (_reals(4, 6, 3), 2, 1), {}, "d0 d2 +"),
    ("split_with_sizes", (_reals(4, 6), [1, 5], -1), {}, "d0 +"),
    ("chunk", (_reals(4, 6), 3), {}, "d1 +"),
    ("cat", ([_reals(4, 6), _reals(4, 2)], -1), {}, "d0 +"),
    ("stack", ([_reals(4, 6), _reals(4, 6)], 1), {}, "d0 d1 +"),
    ("pad", (_reals(4, 6, 8), [0, 0, 1, 0]), {}, "d0 d2"),
    ("_weight_norm", (_reals(4, 6, 3), _positive(4, 1, 1)), {}, "d0"),
    ("_weight_norm", (_reals(4, 6), _positive(1, 6), 1), {}, "d1"),
    ("lstm_cell", (_reals(6, 3), [_reals(6, 2)] * 2, _reals(8, 3), _reals(8, 2), _reals(8), _reals(8)), {}, "b"),
    ("gru_cell", (_reals(6, 3), _reals(6, 2), _reals(6, 3), _reals(6, 2), _reals(6), _reals(6)), {}, "b"),
    ("tril", (_reals(4, 6, 6),), {}, "d0 +"),
    ("full", ([4, 6], 2.0), {}, "d0 d1"),
    ("new_ones", (_reals(3), [4, 6]), {}, "d0 d1"),
    ("arange", (6,), {}, ""),
    ("index.Tensor", (_reals(4, 6, 8), [None, _whole(6, 12)]), {}, "x0 x2 i0"),
    ("index.Tensor", (_reals(4, 6, 8), [_whole(4, 12, 1), None, _whole(8, 3)]), {}, "x1 i0 i1"),
    ("index_select", (_reals(4, 6, 8), 1, _whole(6, 12)), {}, "x0 i x2"),
    ("gather", (_reals(4, 6, 8), 2, _whole(8, 4, 3, 2)), {}, "d0 d2"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_sharded_equals_whole(case: tuple[str, tuple[Any, ...], dict[str, Any], str]) -> None:
    """The expected factors are on offer, and results and gradients are the same under every one of them."""
    target, arguments, keywords, offered = case
    op, layer, operands = capture(f"aten.{target}", arguments, keywords)
    rule = rule_for(op, layer)
    assert rule is not None
    assert {f.name for f in rule.factors} == set(offered.split())
    for sizes in MESHES:
        for factors in assignments(rule, op, layer, sizes, 1):
            if rule.kernel(factors) not in COMMUNICATING:
                assert differences(rule, op, layer, operands, sizes, factors) == [], (sizes, factors)
