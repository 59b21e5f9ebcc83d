"""Causal attention of a part of the queries: context parallelism over gathered keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as attend

from autopar.shard.localize import CallInfo

# ruff: noqa: ARG001 - the signature is that of the op


def causal_attention(
    info: CallInfo,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of this rank's queries, each to the keys up to its own place, whatever `is_causal` says.

    query (..., own queries, d), key and value (..., all places, d): keys behind the last query are left out.
    """
    first, own = info.dims[-2].first, query.shape[-2]
    operands = (query, key[..., : first + own, :], value[..., : first + own, :])
    known: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if not first:
        return attend(*operands, is_causal=True, **known)
    if query.is_cuda:  # fused kernels there need no mask
        return attend(*operands, attn_mask=causal_lower_right(own, first + own), **known)
    with _unsaved(mask := _mask(query, first)):
        return attend(*operands, attn_mask=mask, **known)


def _mask(query: Tensor, first: int) -> Tensor:
    """What is added to the scores (own queries, places): minus infinity behind a query's own place."""
    own = query.shape[-2]
    return torch.full((own, first + own), -torch.inf, dtype=query.dtype, device=query.device).triu(first + 1)


def _unsaved(mask: Tensor) -> saved_tensors_hooks:
    """Makes the mask anew for the backward pass instead of keeping it."""
    place, shape, dtype = mask.data_ptr(), mask.shape, mask.dtype

    def pack(tensor: Tensor) -> Tensor | None:
        return None if tensor.data_ptr() == place else tensor

    def unpack(kept: Tensor | None) -> Tensor:
        return _mask(torch.empty(shape[0], 0, dtype=dtype), shape[1] - shape[0]) if kept is None else kept

    return saved_tensors_hooks(pack, unpack)
