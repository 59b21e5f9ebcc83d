"""Random batches that stand for a user's data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.emit.example import random_batch
from autopar.trace import trace

ROWS = 5


class Tables(nn.Module):
    """Three features in one table of 5 rows each, told apart by offsets; `kind` has a table of its own."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kinds = nn.Embedding(3 * ROWS, 4), nn.Embedding(7, 4)
        self.register_buffer("offsets", ROWS * torch.arange(3))

    def forward(self, features: Tensor, kind: Tensor) -> Tensor:
        found = self.table(features + self.offsets).sum(1) + self.kinds(kind)
        return found.pow(2).mean()  # type: ignore[no-any-return]


def test_what_is_computed_with_before_it_indexes_comes_from_the_example() -> None:
    """Numbers that offsets are added to are samples of the example, others any below the rows of their table."""
    features = torch.tensor([[0, 4, 2], [4, 1, 0]])
    graph = trace(Tables(), {"features": features, "kind": torch.zeros(2, dtype=torch.long)})
    drawn, kinds = random_batch(graph, [features, torch.zeros(2, dtype=torch.long)], 64, 0, torch.device("cpu"))
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in features.tolist()}
    assert set(kinds.tolist()) == set(range(7))
    assert Tables()(drawn, kinds).isfinite()
