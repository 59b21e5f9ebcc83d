"""Cross entropy over split classes, as a dispatcher operator that keeps its logits and one number a row for backward.

From each row the ranks exchange the largest local log-sum-exp, the sum of exponentials and the target's logit
(Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3). Work is done in at least float32, some rows at a time.
"""

# ruff: noqa: ARG001 - signatures are those of the operators

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.shard.collectives import LIBRARY, all_reduce

CHUNK_ELEMENTS = 1 << 22
"""How many logits are widened at a time: bounds the transient memory."""

LIBRARY.define(
    "vocabulary_cross_entropy(Tensor logits, Tensor target, int first, int ignore_index, str group) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "vocabulary_cross_entropy_backward"
    "(Tensor gradient, Tensor logits, Tensor target, Tensor log_total, int first, int ignore_index, str group)"
    " -> Tensor"
)


def vocabulary_cross_entropy(logits: Tensor, target: Tensor, first: int, ignore_index: int, group: str) -> Tensor:
    """Loss of each target, float32 or wider, whole on every rank of `group`; 0 where ignored.

    logits (rows, own classes, ...) or (own classes), of the classes from `first` on; target the same without the dim of
    classes, numbered over all ranks.
    """
    losses, _ = torch.ops.autopar.vocabulary_cross_entropy(logits, target, first, ignore_index, group)
    return losses  # type: ignore[no-any-return]


@torch.library.impl(LIBRARY, "vocabulary_cross_entropy", "CompositeExplicitAutograd")
def _forward(logits: Tensor, target: Tensor, first: int, ignore_index: int, group: str) -> tuple[Tensor, Tensor]:
    rows, wide = _as_rows(logits), _wide(logits)
    local, inside = _local_targets(rows, target, first)
    picked = rows.gather(1, local.unsqueeze(1)).squeeze(1).to(wide).masked_fill_(~inside, 0)
    mine = torch.cat([rows[part].to(wide).logsumexp(1) for part in _chunks(rows)])
    top = all_reduce(mine, group, dist.ReduceOp.MAX)
    total, wanted = all_reduce(torch.stack([(mine - top).exp_(), picked]), group)
    log_total = total.log().add_(top)
    losses = (log_total - wanted).masked_fill_(target.flatten() == ignore_index, 0)
    return losses.view(target.shape), log_total


@torch.library.impl(LIBRARY, "vocabulary_cross_entropy_backward", "CompositeExplicitAutograd")
def _backward(
    gradient: Tensor, logits: Tensor, target: Tensor, log_total: Tensor, first: int, ignore_index: int, group: str
) -> Tensor:
    rows, wide = _as_rows(logits), _wide(logits)
    local, inside = _local_targets(rows, target, first)
    scale = gradient.flatten().to(wide).masked_fill(target.flatten() == ignore_index, 0).unsqueeze(1)
    hits = torch.where(inside.unsqueeze(1), -scale, 0)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for part in _chunks(rows):
        made = result[part] if result.dtype == wide else result.new_empty(result[part].shape, dtype=wide)
        torch.sub(rows[part], log_total[part].unsqueeze(1), out=made).exp_().mul_(scale[part])
        made.scatter_add_(1, local[part].unsqueeze(1), hits[part])
        if result.dtype != wide:
            result[part] = made
    return _from_rows(result, logits)


@torch.library.register_fake("autopar::vocabulary_cross_entropy", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_forward(logits: Tensor, target: Tensor, first: int, ignore_index: int, group: str) -> tuple[Tensor, Tensor]:
    wide = _wide(logits)
    return logits.new_empty(target.shape, dtype=wide), logits.new_empty((target.numel(),), dtype=wide)


@torch.library.register_fake("autopar::vocabulary_cross_entropy_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_backward(
    gradient: Tensor, logits: Tensor, target: Tensor, log_total: Tensor, first: int, ignore_index: int, group: str
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.first, ctx.ignore_index, ctx.group = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None]:
    of_logits = torch.ops.autopar.vocabulary_cross_entropy_backward(
        gradient, *ctx.saved_tensors, ctx.first, ctx.ignore_index, ctx.group
    )
    return of_logits, None, None, None, None


torch.library.register_autograd("autopar::vocabulary_cross_entropy", _differentiate, setup_context=_setup, lib=LIBRARY)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _as_rows(logits: Tensor) -> Tensor:
    """(rows, classes): the dim of classes is the second, or the only one. A rank without any gets one of logit -inf."""
    moved = logits.movedim(min(1, logits.dim() - 1), -1)
    rows = moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])
    return rows if rows.shape[1] else rows.new_full((len(rows), 1), -torch.inf)


def _from_rows(rows: Tensor, logits: Tensor) -> Tensor:
    dim = min(1, logits.dim() - 1)
    own = rows.narrow(1, 0, logits.shape[dim])
    return own.reshape(logits.movedim(dim, -1).shape).movedim(-1, dim)


def _local_targets(rows: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Targets numbered among this rank's classes (0 for others), and which are among them."""
    classes = rows.shape[1]
    local = target.flatten() - first
    inside = (local >= 0) & (local < classes)
    return local.masked_fill_(~inside, 0), inside


def _chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, rows.shape[1]))
    return (slice(i, i + step) for i in range(0, max(1, rows.shape[0]), step))
