"""What a plan says of operators it can't split."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.formulate.planner import ops_without_rule
from autopar.trace.capture import trace


class Scattered(nn.Module):
    """A scatter, for which there is no rule, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        hidden = torch.zeros_like(x).scatter(1, places, self.first(x))
        loss: Tensor = self.last(hidden).mean()
        return loss


def test_ops_without_rule_are_named() -> None:
    """The operator and where it stands are said once; operators with rules are not."""
    inputs = {"x": torch.zeros(4, 8), "places": torch.zeros(4, 8, dtype=torch.long)}
    (found,) = ops_without_rule(trace(Scattered(), inputs))
    assert found.startswith("aten.scatter.src (")
