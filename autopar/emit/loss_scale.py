"""Dynamic scaling of the loss, for gradients that float16 would lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.emit.torch_private import norms_of, scale_all

LARGEST = 2.0**15
"""The largest power of two in float16, which the gradient of a loss in float16 may be."""
PATIENCE = 2000
"""Steps without overflow after which the scale is doubled (as `torch.amp.GradScaler` does)."""


class LossScale:
    """What gradients are multiplied by while they are float16: powers of two, so that nothing is rounded for it.

    A step in which a gradient overflows on any rank halves it, `PATIENCE` steps in a row without one double it. At 1
    it isn't the scale that makes them overflow: then they are left as they are.
    """

    def __init__(self) -> None:
        self.value = LARGEST
        self._since = 0

    def applied(self, loss: Tensor) -> Tensor:
        """The loss itself, whose backward pass starts with the scale."""
        scaled: Tensor = _Scaled.apply(loss, self.value)  # type: ignore[no-untyped-call]
        return scaled

    def take(self, gradients: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device) -> bool:
        """Undo the scale in `gradients`, in place; whether they are to be used: finite on all ranks of `group`.

        Collective over the group.
        """
        held = [g for g in gradients if g.numel()]
        worst = torch.zeros((), device=device, dtype=torch.float32)
        if held:
            scale_all(held, torch.tensor(1 / self.value, device=device, dtype=held[0].dtype))
            worst = torch.stack([n.float() for n in norms_of(held, float("inf"))]).max()
        worst = (~worst.isfinite()).float()
        if group is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        return self._next(overflown=bool(worst))

    def _next(self, overflown: bool) -> bool:
        """Adapt the scale to a step; whether its gradients are to be used."""
        used = not overflown or self.value <= 1
        self._since = self._since + 1 if used else 0
        if not used:
            self.value /= 2
        elif self._since >= PATIENCE:
            self.value, self._since = min(2 * self.value, LARGEST), 0
        return used

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"value": self.value, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.value, self._since = state["value"], state["since"]


class _Scaled(torch.autograd.Function):
    """The identity; its backward multiplies by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None
