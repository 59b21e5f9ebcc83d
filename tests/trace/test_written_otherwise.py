"""Functions and operators that are traced as others: what the graph computes is what the model computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.shard.rules import rule_for
from autopar.trace import trace
from tests.trace.interpreter import largest_difference
from tests.trace.test_ways_of_writing import WIDTH, Model


def triplet(x: Tensor) -> Tensor:
    return x * F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2], reduction="none")[:, None, None]


def margins(x: Tensor) -> Tensor:
    near, far = F.pairwise_distance(x[:, 0], x[:, 1]), torch.linalg.norm(x[:, 2] - x[:, 3], dim=1)
    ones = torch.ones(x.shape[0], dtype=x.dtype)  # on no device in particular
    ranked = F.margin_ranking_loss(near, far, ones, margin=0.2, reduction="none")
    return x * (ranked + F.hinge_embedding_loss(near, -ones, reduction="none"))[:, None, None]


def angles(x: Tensor) -> Tensor:
    same = torch.ones(x.shape[0], dtype=x.dtype)
    return x * F.cosine_embedding_loss(x[:, 0], x[:, 1], same, reduction="none")[:, None, None]


def made_anywhere(x: Tensor) -> Tensor:
    turn = torch.eye(WIDTH, dtype=x.dtype) + torch.zeros(WIDTH, WIDTH, dtype=x.dtype).fill_diagonal_(0.5)
    places = torch.arange(x.shape[1] - 1, -1, -1.0, dtype=x.dtype)
    return x @ turn + torch.outer(places, torch.linspace(0, 1, WIDTH, dtype=x.dtype)).sin()


def told_where_to_write(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.zeros(WIDTH, dtype=x.dtype)
        torch.div(torch.arange(WIDTH, dtype=x.dtype), 4.0, out=scale)
    return x * scale


def spectrum(x: Tensor) -> Tensor:
    found = torch.fft.rfft(x, dim=1)
    kept = torch.zeros_like(found)
    kept[:, :2] = found[:, :2] * (1 + 2j)
    kept[:, -1] = found[:, 0]
    made: Tensor = torch.fft.irfft(kept, n=x.shape[1], dim=1)
    return made


def chances(x: Tensor) -> Tensor:
    drawn = torch.distributions.Categorical(logits=x)
    made: Tensor = x * drawn.entropy()[..., None] + torch.distributions.Normal(x, 1.0).log_prob(x * 0.5)
    return made


@pytest.mark.parametrize("what", [triplet, margins, angles, made_anywhere, told_where_to_write, spectrum, chances])
def test_graph_computes_what_the_model_does(what: Callable[[Tensor], Tensor]) -> None:
    """At a batch the trace did not see, results are equal; samples stay apart and every operator has a rule."""
    torch.manual_seed(0)
    model, x = Model(what).double(), torch.randn(5, 6, WIDTH, dtype=torch.float64)
    graph = trace(model, {"x": x[:2]}, compute_dtype="float64")
    assert graph.separable, graph.why_not_separable
    assert without_rule(graph) == set()
    assert largest_difference(graph, model, {"x": x}, model(x), 5) < 1e-11


def without_rule(graph: OpGraph) -> set[str]:
    """Operators that can't be split."""
    return {op.target for layer in graph.classes for op in layer.ops if rule_for(op, layer) is None}


class Bags(nn.Module):
    """Sums and means of embeddings, and a product of three."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(9, WIDTH, mode="sum"), nn.EmbeddingBag(9, WIDTH)
        self.both = nn.Bilinear(WIDTH, WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.both(self.sums(ids), self.means(ids)).pow(2).mean()
        return loss


def test_bags_can_be_split() -> None:
    """Bags of equal length are gathers and sums, bilinear layers contractions: nothing is one operator."""
    model, ids = Bags().double(), torch.arange(15).view(5, 3) % 9
    graph = trace(model, {"ids": ids[:2]}, compute_dtype="float64")
    targets = {op.target for layer in graph.classes for op in layer.ops}
    assert {"aten.embedding.default", "aten.einsum.default"} < targets
    assert not any("opaque" in target or "bag" in target for target in targets)
    assert largest_difference(graph, model, {"ids": ids}, model(ids), 5) < 1e-12


class Recurrent(nn.Module):
    """A recurrent layer over the first dim of its input, which counts as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.out(self.layer(x)[0]).pow(2).mean()
        return loss


def test_what_grows_with_the_first_dim_in_number() -> None:
    """Of a layer that keeps tensors for each step along the first dim, kept bytes grow with it; samples are joined."""
    graph = trace(Recurrent().double(), {"x": torch.randn(6, 2, WIDTH, dtype=torch.float64)}, compute_dtype="float64")
    (op,) = [op for layer in graph.classes for op in layer.ops if op.target == "aten.lstm.input"]
    assert sum(e.per_sample for spec in op.saved.extra for e in spec.shape) > 0
    assert "lstm" in graph.why_not_separable


class Penalised(nn.Module):
    """A mean over samples and a penalty on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), label) + 0.1 * self.layer.weight.pow(2).sum()


def test_penalties_leave_samples_apart() -> None:
    """What no sample has part in is added to each microbatch's mean, as their mean has it once."""
    inputs = {"x": torch.randn(2, WIDTH), "label": torch.zeros(2, dtype=torch.long)}
    graph = trace(Penalised(), inputs)
    assert graph.separable
    assert graph.loss_form is not None
    assert graph.loss_form.kind == "count"
