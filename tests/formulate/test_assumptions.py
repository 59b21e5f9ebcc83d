"""What a plan says of operators it can't split, and of optimizers it doesn't know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import ops_without_rule
from autopar.trace.capture import trace
from tests.formulate.cases import planner


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


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("adam", ()),
        ("adafactor", ("optimizer adafactor: its step is priced as AdamW's",)),
        ("rprop", ("optimizer rprop: its step and states are priced as AdamW's",)),
    ],
)
def test_optimizers_priced_as_another_are_named(optimizer: str, words: tuple[str, ...]) -> None:
    """A plan says where AdamW stands in for its optimizer, and for what of it."""
    one = planner("mlp")
    one = replace(one, request=replace(one.request, optimizer=optimizer))
    record = one.estimate(ManualConfig(dp=2))
    assert tuple(note for note in record.assumptions if note.startswith("optimizer")) == words
