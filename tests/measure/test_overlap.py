from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.accelerator import standing_in
from autopar.measure import overlap
from autopar.measure.hiding import COVERED, HIDDEN, hidden_share, overlap_keys
from autopar.measure.overlap import time_both
from tests.standin import StandIn

SENT_S, PRODUCT_S = 8e-3, 1e-3


class Job:
    """What is asked of torch.distributed, by one rank, in a time of its own.

    An all-reduce takes `SENT_S`: from when it begins where it goes on `beside` what else is done, else once it is
    waited for.
    """

    def __init__(self, beside: bool) -> None:
        self.beside, self.now_s = beside, 0.0

    def all_reduce(self, *_: Any, **__: Any) -> SimpleNamespace:
        """Begin one."""
        begun_s = self.now_s

        def wait() -> None:
            self.now_s = max(self.now_s, (begun_s if self.beside else self.now_s) + SENT_S)

        return SimpleNamespace(wait=wait)

    def product(self, _: torch.Tensor) -> None:
        """Take `PRODUCT_S`."""
        self.now_s += PRODUCT_S

    def barrier(self) -> None:
        """Alone."""

    def broadcast_object_list(self, *_: Any, **__: Any) -> None:
        """Alone."""


@pytest.mark.parametrize(("beside", "share"), [(True, 1.0), (False, 0.0)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_runs_beside_is_hidden(monkeypatch: pytest.MonkeyPatch, beside: bool, share: float, device: str) -> None:
    """All-reduces of 8 ms that go on beside products of 1 ms are hidden, others are not; by the host's clock and by
    a device's events."""
    job = Job(beside)
    monkeypatch.setattr(overlap, "dist", job)
    monkeypatch.setattr(overlap, "group_named", str)
    monkeypatch.setattr(overlap, "_product", job.product)
    with monkeypatch.context() as clock, standing_in(StandIn()):
        clock.setattr(time, "perf_counter", lambda: job.now_s)
        timings = {key: time_both(key, "", torch.zeros(1, device=device)) for key in overlap_keys(2)}
    assert hidden_share(timings) == pytest.approx(share)
    alone = {key.kind: timing.backward_s for key, timing in timings.items()}
    assert alone == pytest.approx({HIDDEN: SENT_S, COVERED: SENT_S / 2})


def test_nothing_timed_says_nothing() -> None:
    """One rank has nothing to hide, and without timings there is no share."""
    assert overlap_keys(1) == []
    assert hidden_share({}) is None
