"""Copies to the host's memory and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.shard.collectives import LIBRARY


def to_host(x: Tensor) -> Tensor:
    """A contiguous copy of `x` in the host's memory: pinned, and filled in the order of the device's stream.

    Where the device is the host itself it is memory that isn't torch's, so that it doesn't count as the device's.
    """
    if x.device.type == "cpu":
        raw = torch.from_numpy(np.empty(x.numel() * x.element_size(), dtype=np.uint8))
        kept = raw.view(x.dtype).view(x.shape)
    else:
        kept = host_memory(x.shape, x.dtype, x.device)
    return kept.copy_(x, non_blocking=True)


def host_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unset memory of the host, pinned where it is to be exchanged with an accelerator."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type not in ("cpu", "meta"))


def from_host(kept: Tensor, device: torch.device) -> Tensor:
    """A copy of `kept` on the device."""
    return torch.empty_like(kept, device=device).copy_(kept, non_blocking=True)


class _Offload(torch.autograd.Function):
    """The identity; a copy goes to the host in the forward pass, and comes back in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept, ctx.device = to_host(x), x.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from_host(ctx.kept, ctx.device)
        return gradients[0]


# What it takes to keep a tensor on the host, as an operator: it is then timed as others are.
LIBRARY.define("offload(Tensor(a) x) -> Tensor(a)")
LIBRARY.impl("offload", _Offload.apply, "Autograd")
