from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import pytest
import torch

from autopar.accelerator import standing_in
from autopar.cost.roofline import RooflinePricer
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.local import local_cluster
from autopar.measure.ops import time_op
from autopar.measure.profile import Environment, Sample, Timing
from autopar.measure.session import environment_of
from benchmarks.local_ops import errors, lines
from tests.standin import StandIn

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    """A device that isn't there."""
    with standing_in(StandIn()):
        yield


class Slower:
    """Says that every op takes half as long again as the device model says; the `broken`th doesn't run."""

    def __init__(self, broken: int = -1) -> None:
        self.environment: Environment = environment_of(CUDA, 1)
        self.broken = broken

    def ops(self, keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        """One timing each."""
        times = RooflinePricer(local_cluster(CUDA, 1)).ops(keys)
        both = zip((1.5 * times.forward_s).tolist(), (1.5 * times.backward_s).tolist(), strict=True)
        timed = {key: Timing(Sample((f,)), Sample((b,))) for key, (f, b) in zip(keys, both, strict=True)}
        return timed | {key: Timing(failed="out of memory") for key in keys[self.broken : self.broken + 1]}

    def collectives(self, keys: Sequence[CollectiveKey]) -> dict[CollectiveKey, Timing]:
        """None: there is one process."""
        del keys
        return {}


class OnMeta(Slower):
    """Times operators without data through the stand-in's events."""

    def ops(self, keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        """As on a device."""
        return {key: time_op(key, torch.device("meta"), budget_s=0.0) for key in keys}


def test_held_out_shapes_of_a_slower_device_are_predicted() -> None:
    """Where all is 1.5 times as slow as the model says, three quarters of the shapes tell that of the last quarter."""
    found = errors(48, CUDA, Slower())
    assert found["failed"] == []
    assert set(found["errors"]) == {
        f"{k} {p}" for k in ("products", "attention", "norms") for p in ("forward", "backward")
    }
    assert all(median(apes) < 1e-6 for apes in found["errors"].values())


def test_what_does_not_run_is_told_and_left_out() -> None:
    """A held-out shape that ran out of memory is counted as failed, and has no error."""
    found, whole = errors(48, CUDA, Slower(broken=3)), errors(48, CUDA, Slower())
    assert found["failed"] == ["out of memory"]
    assert len(found["errors"]["products forward"]) == len(whole["errors"]["products forward"]) - 1
    assert "1 calls failed" in list(lines(found))[-1]


def test_shapes_run_on_a_device() -> None:
    """Each of the calls that are profiled on cuda can be made, forward and backward, and is timed by events."""
    found = errors(16, CUDA, OnMeta())
    assert found["failed"] == []
    assert all(apes for apes in found["errors"].values())
