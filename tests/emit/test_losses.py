"""Every loss the batch of which may be split in time: microbatches against the whole batch, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.build import emit
from autopar.emit.loss_weights import equal_means
from autopar.errors import EmitError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from tests.emit.handmade import data_parallel, record_of

ROWS, CLASSES = 8, 6
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A linear map under a loss of its output and labels; labels below 0 are left out by losses that can."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.linear(x), labels)


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp(min=0), CLASSES).double()


def class_weights(like: Tensor) -> Tensor:
    return torch.arange(1, CLASSES + 1, dtype=like.dtype, device=like.device)


def vae(scores: Tensor, labels: Tensor) -> Tensor:
    """Sums of a reconstruction term and a divergence, over all elements and over samples."""
    mean, log_variance = scores.chunk(2, dim=1)
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.binary_cross_entropy_with_logits(scores, one_hot(labels), reduction="sum") + divergence


REDUCED: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "mse": lambda s, y, r: F.mse_loss(s, one_hot(y), reduction=r),
    "l1": lambda s, y, r: F.l1_loss(s, one_hot(y), reduction=r),
    "smooth l1": lambda s, y, r: F.smooth_l1_loss(s, one_hot(y), reduction=r),
    "huber": lambda s, y, r: F.huber_loss(s, one_hot(y), reduction=r),
    "soft margin": lambda s, y, r: F.soft_margin_loss(s, one_hot(y), reduction=r),
    "cross entropy": lambda s, y, r: F.cross_entropy(s, y, ignore_index=-1, reduction=r),
    "smoothed cross entropy": lambda s, y, r: F.cross_entropy(s, y, ignore_index=-1, label_smoothing=0.1, reduction=r),
    "cross entropy of probabilities": lambda s, y, r: F.cross_entropy(s, one_hot(y), reduction=r),
    "nll": lambda s, y, r: F.nll_loss(s.log_softmax(-1), y, ignore_index=-1, reduction=r),
    "bce": lambda s, y, r: F.binary_cross_entropy(s.sigmoid(), one_hot(y), reduction=r),
    "bce with logits": lambda s, y, r: F.binary_cross_entropy_with_logits(s, one_hot(y), reduction=r),
    "kl": lambda s, y, r: F.kl_div(s.log_softmax(-1), one_hot(y), reduction=r),
}


def reduced(name: str, reduction: str) -> Loss:
    return lambda scores, labels: REDUCED[name](scores, labels, reduction)


SPLIT: dict[str, Loss] = {f"{name} {r}": reduced(name, r) for name in REDUCED for r in ("mean", "sum")}
SPLIT |= {
    "kl batchmean": lambda s, y: F.kl_div(s.log_softmax(-1), one_hot(y), reduction="batchmean"),
    "unreduced, then mean": lambda s, y: F.cross_entropy(s, y, ignore_index=-1, reduction="none").mean(),
    "unreduced, then sum": lambda s, y: F.mse_loss(s, one_hot(y), reduction="none").sum(dim=1).sum(),
    "scaled": lambda s, y: -2 * F.nll_loss(s, y, ignore_index=-1) / 3,
    "two sums": vae,
    "two sums over the batch": lambda s, y: vae(s, y) / s.shape[0],
    "two means": lambda s, y: F.mse_loss(s, one_hot(y)) + 0.1 * s.abs().mean(),
    "cross entropy weighted by class, sum": lambda s, y: F.cross_entropy(
        s, y.clamp(min=0), class_weights(s), reduction="sum"
    ),
}
JOINED: dict[str, tuple[Loss, str]] = {
    "weighted by class": (
        lambda s, y: F.cross_entropy(s, y, class_weights(s), ignore_index=-1), "weighted",
    ),
    "mean over a mask": (lambda s, y: (s.sum(1) * (y >= 0)).sum() / (y >= 0).sum(), "reduced over the batch"),
    "targets of its own": (lambda s, y: F.cross_entropy(s, torch.where(s[:, 0] > 0, y, -100)), "inputs alone"),
    "mean and sum": (lambda s, _: s.mean() + s.sum(), "joins losses that are sums, means or counted"),
    "two counted means": (
        lambda s, y: F.cross_entropy(s, y, ignore_index=-1) + F.nll_loss(s, y, ignore_index=0),
        "joins losses that are sums, means or counted",
    ),
}  # fmt: skip


def batch() -> dict[str, Tensor]:
    """Labels left out lie very unevenly over the microbatches; one of them counts nothing."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.tensor([-1, 2, -1, -1, 3, 1, 0, -1])
    return {"x": torch.randn(ROWS, 4, generator=generator, dtype=torch.float64), "labels": labels}


def planned(loss: Loss) -> tuple[nn.Module, OpGraph, PlanRecord]:
    torch.manual_seed(0)
    model = Model(loss).double()
    example = {"x": torch.zeros(2, 4), "labels": torch.tensor([0, 1])}
    graph = trace(model, example, compute_dtype="float64")
    record = record_of(graph, (), lambda i: data_parallel(graph, i, ()), global_batch=ROWS, num_microbatches=4)
    return model, graph, record


@pytest.mark.parametrize("name", SPLIT)
def test_microbatches_make_up_the_whole_batch(name: str) -> None:
    """Loss and gradients of four microbatches are those of the batch taken at once."""
    model, graph, plan = planned(SPLIT[name])
    assert graph.separable, graph.why_not_separable
    pm = emit(plan, graph, model, device="cpu")
    loss = model(**batch())
    loss.backward()
    torch.testing.assert_close(pm.train_step(**batch()), loss.detach(), rtol=1e-12, atol=1e-14)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(pm.get_parameter(key).grad, parameter.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", JOINED)
def test_losses_that_join_samples_are_not_split(name: str) -> None:
    """What is no plain sum or mean is not separable, says why, and a plan of several microbatches is refused."""
    loss, words = JOINED[name]
    model, graph, plan = planned(loss)
    assert words in graph.why_not_separable
    assert graph.loss_form is None
    with pytest.raises(EmitError, match="can't be split in time"):
        emit(plan, graph, model, device="cpu")


@pytest.mark.parametrize(("name", "each"), [("cross entropy sum", 1 / 8), ("cross entropy mean", 1 / 2)])
def test_weights_of_a_mean_of_means(name: str, each: float) -> None:
    """Of four replicas and two microbatches a sum weighs an eighth; means are averaged over replicas already."""
    _, graph, _ = planned(SPLIT[name])
    assert equal_means(graph, 4)([{}, {}], 8) == [each, each]
