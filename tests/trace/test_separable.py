"""Whether microbatches are legal, against splitting real batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.trace import trace
from tests.trace.models import CASES


class _With(nn.Module):
    """A linear map, a step under test, and a loss under test."""

    def __init__(self, step: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.step, self.loss = step, loss

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.step(self.linear(x)))
        return loss


def _mean(x: Tensor) -> Tensor:
    return x.pow(2).mean()


def _same(x: Tensor) -> Tensor:
    return x


APART: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mean": (_same, _mean),
    "sum": (_same, lambda x: x.sum() * 3),
    "softmax of features": (lambda x: x.softmax(-1), _mean),
    "views": (lambda x: x.view(-1, 2, 2).transpose(1, 2).flatten(1), _mean),
    "flattened batch": (lambda x: x.reshape(-1, 2), _mean),
    "two sums": (_same, lambda x: x.sum() + x.abs().sum()),
    "slices": (lambda x: torch.cat((x[:, 2:], x[:, :2]), dim=1), _mean),
    "sum over the batch size": (_same, lambda x: x.sum() / x.shape[0]),
    "einsum of features": (lambda x: torch.einsum("b...,b...->b...", x, x), _mean),
    "mean of means": (_same, lambda x: x.mean(dim=1).mean()),
}
TOGETHER: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "contrastive": (_same, lambda x: (x @ x.t()).softmax(-1).mean()),
    "einsum of pairs": (lambda x: torch.einsum("bi,ci->bc", x, x), _mean),
    "einsum over samples": (lambda x: torch.einsum("bi,bj->ij", x, x), _mean),
    "softmax of samples": (lambda x: x.softmax(0), _mean),
    "running sum": (lambda x: x.cumsum(0), _mean),
    "centred": (lambda x: x - x.mean(dim=0), _mean),
    "root of the loss": (_same, lambda x: _mean(x).sqrt()),
    "batch size as a factor": (_same, lambda x: x.sum() * x.shape[0]),
    "rounded": (_same, lambda x: torch.div(x.sum(), 2, rounding_mode="floor")),
    "sum and a constant": (_same, lambda x: x.sum() + 1),
    "first sample": (lambda x: x[:1].expand(x.shape[0], 4) * x, _mean),
    "numbered samples": (lambda x: x * torch.arange(x.shape[0], device=x.device).unsqueeze(1), _mean),
    "features become samples": (lambda x: x.t().reshape(-1, 4), _mean),
    "reversed": (lambda x: x.flip(0) * x, _mean),
    "no reduction": (_same, lambda x: x.pow(2).mean(dim=0)[0]),
    "product": (_same, lambda x: x.abs().sum(dim=1).prod()),
}


@pytest.mark.parametrize("name", APART)
def test_samples_kept_apart(name: str) -> None:
    """Judged separable, and the loss of a batch is the sum or mean of the losses of its halves."""
    model = _With(*APART[name]).double()
    graph = trace(model, (torch.zeros(4, 4, dtype=torch.float64),))
    assert graph.separable, graph.why_not_separable
    x = torch.randn(8, 4, dtype=torch.float64)
    halves = model(x[:4]) + model(x[4:])
    assert any(torch.allclose(model(x), value) for value in (halves, halves / 2))


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_meet(name: str) -> None:
    """Judged not separable, with a reason."""
    graph = trace(_With(*TOGETHER[name]).double(), (torch.zeros(4, 4, dtype=torch.float64),))
    assert not graph.separable
    assert graph.why_not_separable


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool) -> None:
    """Batch norm couples samples in training mode only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(training)
    graph = trace(model, (torch.zeros(4, 4),), loss_fn=lambda output: output.pow(2).mean())
    assert graph.separable != training
    assert ("batch norm" in graph.why_not_separable) == training


class Counting(nn.Module):
    """A mean loss whose forward pass counts how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ran: torch.Tensor
        self.register_buffer("ran", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.add_(1)
        loss: torch.Tensor = self.linear(x).square().mean()
        return loss


def test_buffers_change_once_a_step() -> None:
    """What forward changes would be changed by every microbatch, so such a model is never split in time."""
    graph = trace(Counting(), (torch.zeros(4, 4),))
    assert not graph.separable
    assert "forward changes buffers (ran)" in graph.why_not_separable


@pytest.mark.parametrize("name", ["mlp", "residual", "tied", "gpt", "llama", "hf gpt2", "hf llama"])
def test_usual_models_are_separable(name: str) -> None:
    """Regression and language models with a mean loss may be split in time."""
    graph = trace(CASES[name].model().double(), CASES[name].batch_of(2))
    assert graph.separable, graph.why_not_separable


def test_weighted_mean_is_one_reduction() -> None:
    """A cross-entropy that ignores labels is a count-weighted mean; adding another mean to it is not, which is said."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.linear(x)
            loss: Tensor = F.cross_entropy(scores, y) + scores.pow(2).mean()
            return loss

    graph = trace(Two(), (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)))
    assert not graph.separable
    assert "joins losses" in graph.why_not_separable
