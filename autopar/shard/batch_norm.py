"""Batch norm over samples that lie on several ranks, as a dispatcher operator: statistics are those of all samples.

Each channel's mean, then its variance about the common mean, are averaged over the ranks, each by its share of the
samples; the backward pass sums the two numbers a channel that the gradient of each sample depends on (Ioffe and
Szegedy, arXiv:1502.03167, section 3). Work is done in at least float32.
"""

# ruff: noqa: ARG001 - signatures are those of the operators

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.shard.collectives import LIBRARY, all_reduce

LIBRARY.define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, int samples, str group) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "batch_norm_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor mean, Tensor variance, float eps,"
    " int samples, str group) -> (Tensor, Tensor, Tensor)"
)


def split_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, samples: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised samples of this rank, and mean and (biased) variance of all, float32 or wider.

    x (own samples, channels, ...), all being `samples`, weight and bias (channels).
    """
    return torch.ops.autopar.batch_norm(x, weight, bias, eps, samples, group)  # type: ignore[no-any-return]


@torch.library.impl(LIBRARY, "batch_norm", "CompositeExplicitAutograd")
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, samples: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(_wide(x))
    own_variance, own_mean = _statistics(wide)
    share = len(x) / samples
    mean = all_reduce(own_mean * share, group)
    variance = all_reduce((own_variance + (own_mean - mean).square()) * share, group)
    result = _centred(wide, mean).mul_(_channels(_scale(weight, variance, eps), x))
    if bias is not None:
        result += _channels(bias, x)
    return result.to(x.dtype), mean, variance


@torch.library.impl(LIBRARY, "batch_norm_backward", "CompositeExplicitAutograd")
def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float, samples: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = gradient.to(mean.dtype)
    unit = _centred(x.to(mean.dtype), mean).mul_(_channels((variance + eps).rsqrt(), x))
    of_bias, of_weight = wide.sum(_others(x)), (wide * unit).sum(_others(x))
    count = samples * prod(x.shape[2:])
    shared = all_reduce(torch.stack((of_bias, of_weight)), group) / count
    of_x = (wide - _channels(shared[0], x)).sub_(unit.mul_(_channels(shared[1], x)))
    of_x = of_x.mul_(_channels(_scale(weight, variance, eps), x))
    dtype = x.dtype if weight is None else weight.dtype
    return of_x.to(x.dtype), of_weight.to(dtype), of_bias.to(dtype)


@torch.library.register_fake("autopar::batch_norm", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, samples: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty((x.shape[1],), dtype=_wide(x))
    return torch.empty_like(x), statistics, torch.empty_like(statistics)


@torch.library.register_fake("autopar::batch_norm_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float, samples: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    like = mean.new_empty(mean.shape, dtype=x.dtype if weight is None else weight.dtype)
    return torch.empty_like(x), like, torch.empty_like(like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps, ctx.samples, ctx.group = inputs
    ctx.given = weight is not None, bias is not None
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_bias = torch.ops.autopar.batch_norm_backward(
        gradient, *ctx.saved_tensors, ctx.eps, ctx.samples, ctx.group
    )
    weighted, shifted = ctx.given
    return of_x, of_weight if weighted else None, of_bias if shifted else None, None, None, None


torch.library.register_autograd("autopar::batch_norm", _differentiate, setup_context=_setup, lib=LIBRARY)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each channel; zeros where there is no sample."""
    if not len(x):
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    variance, mean = torch.var_mean(x, _others(x), correction=0)
    return variance, mean


def _others(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _channels(vector: Tensor, x: Tensor) -> Tensor:
    """One number a channel, to be broadcast against `x`."""
    return vector.view(-1, *[1] * (x.dim() - 2))


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    return x - _channels(mean, x)


def _scale(weight: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    inverse = (variance + eps).rsqrt()
    return inverse if weight is None else inverse * weight
