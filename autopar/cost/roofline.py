"""Seconds from datasheet figures: the larger of compute and memory traffic at the device's efficiencies, and launches.

A matrix product reaches the device's efficiency times a *fill* that falls for small sizes: rows and columns are
rounded up to tiles, `tiles / (tiles + half_tiles)` of the device is busy and `k / (k + half_k)` of the time is spent
multiplying rather than filling the pipeline. The constants below belong to a backend, not to a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster, Device
from autopar.cost.collectives import collective_times
from autopar.cost.pricer import CollectiveTimes, OpTimes, Seconds
from autopar.cost.work import Pass, work
from autopar.errors import ConfigError
from autopar.graph import CollectiveKey, OpKey

DEFAULT_EFFICIENCY = 0.7
"""Share of a peak assumed where the device file gives none."""


@dataclass(frozen=True)
class Ramp:
    """How a backend's matrix products fill up with size (see above); `tile` in rows and columns."""

    tile: int
    half_tiles: float
    half_k: float


RAMPS = {"cuda": Ramp(128, 10.0, 150.0), "cpu": Ramp(16, 4.0, 32.0)}
"""cuda: fitted on bf16 and fp16 products timed on A100 and H100 (with efficiencies of 0.8: 9 % median error)."""


Sizes: TypeAlias = NDArray[np.float64]


def gemm_fill(batch: Sizes, m: Sizes, n: Sizes, k: Sizes, ramp: Ramp) -> NDArray[np.float64]:
    """Share of the reachable FLOP/s that products of these sizes get, in (0, 1]; all arrays of one shape."""
    rows, columns = np.ceil(m / ramp.tile), np.ceil(n / ramp.tile)
    used = (m * n) / (rows * columns * ramp.tile**2)
    tiles = batch * rows * columns
    fill: NDArray[np.float64] = used * tiles / (tiles + ramp.half_tiles) * k / (k + ramp.half_k)
    return fill


@dataclass(frozen=True)
class RooflinePricer:
    """Prices everything from the cluster's figures; every source is `roofline`."""

    cluster: Cluster

    def identity(self) -> str:
        """Hash of the cluster's figures."""
        return hashlib.sha256(repr(self.cluster).encode()).hexdigest()[:16]

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op, forward and backward. Raises ConfigError for a dtype the device has no rate for."""
        forward, backward = _Passes(), _Passes()
        for key in keys:
            found = work(key)
            forward.add(found.forward, found.dtype)
            backward.add(found.backward, found.dtype)
        device = self.cluster.device
        return OpTimes(forward.seconds(device), backward.seconds(device), ["roofline"] * len(keys))

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective in closed form (`cost/collectives.py`)."""
        return collective_times(keys, self.cluster)


class _Passes:
    """Columns of many passes: plain numbers only, which keeps the garbage collector out of the way."""

    def __init__(self) -> None:
        self.moved: list[float] = []
        self.launches: list[int] = []
        self.gemms: list[float] = []
        self.owners: list[int] = []
        self.dtypes: list[str] = []

    def add(self, one: Pass, dtype: str) -> None:
        for gemm in one.gemms:
            self.gemms.extend(gemm)
            self.owners.append(len(self.moved))
            self.dtypes.append(dtype)
        self.moved.append(one.bytes)
        self.launches.append(one.launches)

    def seconds(self, device: Device) -> Seconds:
        """Seconds of each pass, shape (passes,)."""
        memory_rate = device.memory_bytes_per_s * device.efficiency.get("memory", DEFAULT_EFFICIENCY)
        moving = np.array(self.moved, dtype=np.float64) / memory_rate
        return np.maximum(self._computing(device), moving) + np.array(self.launches) * device.launch_s

    def _computing(self, device: Device) -> Seconds:
        rates = {dtype: flop_rate(device, dtype) for dtype in set(self.dtypes)}
        rate = np.array([rates[dtype] for dtype in self.dtypes])
        batch, m, n, k, flops = np.array(self.gemms, dtype=np.float64).reshape(-1, 5).T
        total = np.zeros(len(self.moved))
        np.add.at(total, self.owners, flops / (rate * gemm_fill(batch, m, n, k, RAMPS[device.backend])))
        return total


def flop_rate(device: Device, dtype: str) -> float:
    """FLOP/s that large products of `dtype` reach. Raises ConfigError when the device has no figure for it."""
    peak = device.peak_flops_per_s.get(dtype)
    if not peak:
        known = ", ".join(sorted(device.peak_flops_per_s))
        raise ConfigError(f"device {device.name!r} has no peak FLOP/s for {dtype}; it has {known}. Choose one.")
    return peak * device.efficiency.get(dtype, DEFAULT_EFFICIENCY)
