"""What `verify` says of differences."""

from __future__ import annotations

import math

import torch

from autopar.verify import Difference, VerifyReport, _compare, _Training


def _training(gradients: list[float], loss: float = 1.0) -> _Training:
    named = {f"p{i}": torch.tensor([value]) for i, value in enumerate(gradients)}
    return _Training([loss], named, {})


def test_nothing_hides_a_gradient_that_is_no_number() -> None:
    """The largest difference is nan whether nan comes first, last, or from one rank of several."""
    theirs = _training([1.0, 1.0, 1.0])
    for at in range(3):
        broken = _training([math.nan if i == at else 1.0 + 1e-9 for i in range(3)])
        for ours in ([broken], [_training([1.0, 1.0, 1.0]), broken]):
            report = _compare(ours, theirs, "a model")
            assert math.isnan(report.largest)
            assert report.gradient.where == f"p{at}"


def test_nothing_hides_a_loss_that_is_no_number() -> None:
    """So is it where a loss is, whatever the gradients do."""
    assert math.isnan(_compare([_training([1.0], math.nan), _training([1.0])], _training([1.0]), "a model").largest)
    alike = Difference(0.0)
    assert VerifyReport(1.0, 1.0, 0.5, alike, alike, (), 1, "a model").largest == 0.5
