"""Ops that need more than the ATen op on local shards where a factor is split.

Each kernel is called as `kernel(name)(info, *args, **kwargs)`: `info` is the `CallInfo` of the call (plain literals),
the rest are the op's own arguments as `localize.local_call` gives them, tensors being local shards. `dropout` further
takes `draw`, see there.
"""

# ruff: noqa: ARG001 - signatures are those of the ops

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from autopar.shard.attention import causal_attention
from autopar.shard.batch_norm import split_batch_norm
from autopar.shard.collectives import all_reduce
from autopar.shard.localize import CallInfo
from autopar.shard.masks import keep_mask
from autopar.shard.vocabulary import vocabulary_cross_entropy
from autopar.trace.run import overload

MEAN, SUM = 1, 2


def kernel(name: str) -> Callable[..., Any]:
    """The kernel that a rule calls `name`."""
    return KERNELS[name]


def embedding_rows(
    info: CallInfo,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table cut by rows, zeros for those that other ranks hold.

    weight (own rows, d), indices (...), result (..., d).
    """
    first, local = info.rows.first, indices - info.rows.first
    elsewhere = (local < 0) | (local >= weight.shape[0])
    padding = padding_idx - first if first <= padding_idx < first + weight.shape[0] else -1
    table = weight if len(weight) else torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    rows = torch.ops.aten.embedding.default(table, local.masked_fill_(elsewhere, 0), padding)
    result: Tensor = rows.masked_fill_(elsewhere.unsqueeze(-1), 0)
    return result


def cross_entropy(
    info: CallInfo,
    logits: Tensor,
    target: Tensor,
    weight: None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of class indices with rows, classes or both split; reduction none (0), mean (1) or sum (2).

    logits (rows, classes, ...) or (classes), target the same without classes. The mean is the local sum over the number
    of targets of all ranks that are not ignored, so it is partial over the axes that split rows.
    """
    if info.rows.size > 1:
        losses = vocabulary_cross_entropy(logits, target, info.rows.first, ignore_index, info.rows.group)
        total = losses.sum() if reduction in (MEAN, SUM) else losses
    else:
        whole = SUM if reduction == MEAN else reduction
        total = torch.ops.aten.cross_entropy_loss.default(logits, target, weight, whole, ignore_index, label_smoothing)
    if reduction == MEAN:
        total = total / _count(target != ignore_index, info.parts) / info.means
    return total.to(logits.dtype)


def mean(info: CallInfo, *args: Any, **kwargs: Any) -> Tensor:
    """A mean over split dims: the local one by this rank's share of what is averaged, a partial result."""
    found: Tensor = overload(info.target)(*args, **kwargs)
    return found / info.multiple if info.multiple < inf else found.masked_fill(found.new_ones((), dtype=torch.bool), 0)


def batch_norm(
    info: CallInfo,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *further: Any,
) -> Any:
    """Batch norm of samples that are split: in training with the statistics of the samples of all ranks.

    `_native_batch_norm_legit_functional` returns these, and the running ones moved towards them, too.
    """
    if not training:
        return overload(info.target)(x, weight, bias, running_mean, running_var, training, momentum, eps, *further)
    samples = info.shape[0]
    result, mean, variance = split_batch_norm(x, weight, bias, eps, samples, info.dims[0].group)
    if running_mean is None or running_var is None:
        return result
    count = samples * prod(x.shape[2:])
    moved = [
        old.lerp(new.detach().to(old.dtype), momentum)
        for old, new in ((running_mean, mean), (running_var, variance * (count / (count - 1))))
    ]
    return result, mean, (variance + eps).rsqrt(), *moved


def dropout(info: CallInfo, x: Tensor, p: float, train: bool | None = True, *, draw: Tensor) -> Any:
    """Dropout whose mask is a function of the element's place in the global batch, whatever the layout.

    `draw` (1 + samples,) int64: the seed of this layer's call, then the number in the global batch of each sample of
    the microbatch. `native_dropout` returns the mask, too.
    """
    keep = keep_mask(info, draw, p)
    kept = (x * keep).mul_(0.0 if p >= 1 else 1 / (1 - p))
    return (kept, keep) if "native_dropout" in info.target else kept


KERNELS: dict[str, Callable[..., Any]] = {
    "embedding_rows": embedding_rows,
    "cross_entropy": cross_entropy,
    "batch_norm": batch_norm,
    "mean": mean,
    "mean_loss": mean,
    "dropout": dropout,
    "causal_attention": causal_attention,
}
"""The kernels by the name that rules give."""


def _count(chosen: Tensor, group: str) -> Tensor:
    """Number of true elements over all ranks."""
    return all_reduce(chosen.sum(), group) if group else chosen.sum()
