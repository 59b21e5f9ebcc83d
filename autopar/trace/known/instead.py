"""Functions of torch written with others, whose operators can be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    **further: Any,
) -> Tensor:
    """`torch.nn.functional.embedding_bag`: of bags (b, l) the sum or mean (b, d) of rows that were gathered.

    Bags given by offsets, or with options that count indices, stay one operator.
    """
    plain = input.ndim == 2 and offsets is None and max_norm is None and not scale_grad_by_freq and mode != "max"
    if not plain or further.get("padding_idx") is not None:
        return F.embedding_bag(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
                               per_sample_weights, **further)  # fmt: skip
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.mean(1) if mode == "mean" else rows.sum(1)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.bilinear`: (..., i), (..., j), (o, i, j), (o) -> (..., o)."""
    made = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return made if bias is None else made + bias


def fill_diagonal(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """`Tensor.fill_diagonal_` of a matrix."""
    if self.ndim != 2 or wrap:
        return self.fill_diagonal_(fill_value, wrap)
    return self.masked_fill_(torch.eye(*self.shape, dtype=torch.bool, device=self.device), fill_value)


INSTEAD: dict[Any, Callable[..., Tensor]] = {
    F.embedding_bag: embedding_bag,
    F.bilinear: bilinear,
    Tensor.fill_diagonal_: fill_diagonal,
}
"""What is called instead, by function."""
