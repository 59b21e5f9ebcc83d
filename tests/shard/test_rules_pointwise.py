"""Every elementwise op of the table, run on simulated shards of broadcast operands against the op run whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.trying import (
    Call,
    assert_sharded_equals_whole,
    complexes,
    inner,
    named,
    positive,
    reals,
    truth,
    whole,
)  # fmt: skip

MESHES = ((3,), (2, 2))
"""Of dims of 4 and 6: an even split, one that leaves a rank a shorter part or none, and both dims at once."""


def _each(names: str, *arguments: Any, offered: str = "d0 d1") -> list[Call]:
    return [(name, arguments, {}, offered) for name in names.split()]


CALLS: list[Call] = [
    *_each(
        "abs asinh atan arctan absolute ceil celu cos cosh deg2rad detach elu erf erfc exp exp2 expm1 fix floor "
        "frac hardsigmoid hardswish hardtanh i0 leaky_relu lift_fresh_copy log_sigmoid mish nan_to_num negative "
        "positive rad2deg relu relu6 resolve_conj resolve_neg round selu sgn sigmoid sign sin sinc sinh softplus "
        "square tan tanh trunc ones_like zeros_like zero isfinite isinf isnan isneginf isposinf "
        "signbit logical_not lift gelu silu hardshrink softshrink",
        reals(4, 6),
    ),
    *_each("special_entr digamma lgamma log log10 log1p log2 reciprocal sqrt rsqrt", positive(4, 6)),
    *_each("acos asin atanh erfinv", inner(4, 6)),
    *_each("acosh", positive(4, 6) + 1),
    *_each("logit", positive(4, 6) / 9, 1e-3),
    *_each("clamp clip hardtanh", reals(4, 6), -0.5, 0.5),
    *_each("clamp_min clamp_max", reals(4, 6), 0.2),
    *_each("clamp.Tensor", reals(4, 6), reals(6) - 2, reals(4, 1) + 2),
    *_each("threshold", reals(4, 6), 0.1, 20.0),
    *_each(
        "atan2 arctan2 copysign.Tensor eq.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor ne.Tensor fmod.Tensor "
        "greater.Tensor greater_equal.Tensor less.Tensor less_equal.Tensor not_equal.Tensor hypot logaddexp "
        "logaddexp2 logical_and logical_or logical_xor maximum minimum multiply.Tensor mul.Tensor remainder.Tensor "
        "subtract.Tensor rsub.Tensor",
        reals(4, 6),
        reals(6),
    ),
    *_each("nextafter", reals(4, 6), positive(6)),
    *_each("divide.Tensor true_divide.Tensor div.Tensor", reals(4, 6), positive(4, 1)),
    *_each("float_power.Tensor_Tensor pow.Tensor_Tensor xlogy.Tensor", positive(4, 6), positive(6)),
    *_each("addcdiv", reals(4, 6), reals(6), positive(4, 1)),
    *_each("addcmul", reals(4, 6), reals(6), reals(4, 1)),
    *_each("lerp.Tensor", reals(4, 6), reals(6), reals(4, 1)),
    *_each("lerp.Scalar", reals(4, 6), reals(6), 0.3),
    *_each("copy", whole(9, 4, 6), whole(9, 4, 6)),
    *_each("broadcast_to", reals(4, 1), [4, 6], offered="d0 d1 +"),
    *_each("fill.Scalar full_like", reals(4, 6), 2.0),
    *_each("masked_fill.Scalar", reals(4, 6), truth(6), 2.0),
    *_each("where.self", truth(4, 1), reals(4, 6), reals(6)),
    *_each("to.dtype", reals(4, 6), torch.float32),
    *_each("_to_copy alias contiguous neg clone", reals(4, 6), offered="d0 d1 +"),
    *_each("__and__.Tensor __or__.Tensor __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor",
           truth(4, 6), truth(6)),
    *_each("bitwise_not", truth(4, 6)),
    *_each("bitwise_left_shift.Tensor bitwise_right_shift.Tensor gcd lcm heaviside", whole(8, 4, 6), whole(5, 6)),
    *_each("floor_divide", whole(8, 4, 6), whole(5, 6) + 1),
    *_each("complex", reals(4, 6), reals(6)),
    *_each("polar", positive(4, 6), reals(6)),
    *_each("real imag conj angle resolve_conj abs", complexes(4, 6)),
    *_each("mul.Tensor", complexes(4, 6), complexes(6)),
    *_each("max.other min.other", reals(4, 6), reals(6)),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=named(CALLS))
def test_sharded_equals_whole(call: Call) -> None:
    """Both dims can be split, and results and gradients are the same under every split."""
    assert_sharded_equals_whole(call, MESHES)
