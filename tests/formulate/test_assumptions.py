"""What a plan says of operators it can't split, and of optimizers it doesn't know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.formulate.config import ManualConfig
from autopar.graph import Operand, OpKey
from autopar.trace.capture import trace
from tests.formulate.cases import planner


class Inverting(nn.Module):
    """Inverses of matrices, for which there is no rule, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.cholesky_inverse(self.first(x))).mean()
        return loss


def test_ops_without_rule_are_named() -> None:
    """The operator, where it stands and what it takes of all microbatches are said once; the plan can be made."""
    graph = trace(Inverting(), {"x": torch.zeros(4, 8, 8)}, compute_dtype="float32")
    one = replace(planner("mlp"), graph=graph)
    record = one.estimate(ManualConfig(dp=2, microbatch_size=4))
    (found,) = [note for note in record.assumptions if "no sharding rule" in note]
    key = OpKey("aten.cholesky_inverse.default", (Operand((8, 8, 8), "float32", True),))
    times = one.pricer.ops([key])
    assert found.startswith("aten.cholesky_inverse.default (the model itself)")
    assert f"{1e3 * float(times.forward_s[0] + times.backward_s[0]):.3g} ms of a step" in found


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
