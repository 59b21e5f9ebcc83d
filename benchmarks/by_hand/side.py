"""What a comparison runs of each side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.by_hand.gpt import Dims, text


@dataclass(frozen=True)
class Side:
    """Parameters for the optimizer, and what does forward and backward and leaves synchronised gradients."""

    parameters: list[nn.Parameter]
    loss: Callable[[], Tensor]


def rows(dims: Dims, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """One part of the batch: ids and labels."""
    mine = text(dims).chunk(parts)[part]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
