"""Seconds from datasheet figures: the larger of compute and memory traffic at the device's efficiencies, and launches.

A matrix product reaches the device's efficiency times a *fill* that falls for small sizes: rows and columns are
rounded up to tiles, `tiles / (tiles + half_tiles)` of the device is busy and `k / (k + half_k)` of the time is spent
multiplying rather than filling the pipeline. The constants below belong to a backend, not to a device.
"""

from __future__ import annotations

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

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op, forward and backward. Raises ConfigError for a dtype the device has no rate for."""
        found = [work(key) for key in keys]
        dtypes = [w.dtype for w in found]
        forward = pass_seconds([w.forward for w in found], dtypes, self.cluster.device)
        backward = pass_seconds([w.backward for w in found], dtypes, self.cluster.device)
        return OpTimes(forward, backward, ["roofline"] * len(found))

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective in closed form (`cost/collectives.py`)."""
        return collective_times(keys, self.cluster)


def pass_seconds(passes: Sequence[Pass], dtypes: Sequence[str], device: Device) -> Seconds:
    """Seconds of each pass, shape (passes,)."""
    memory_rate = device.memory_bytes_per_s * device.efficiency.get("memory", DEFAULT_EFFICIENCY)
    moved = np.array([p.bytes for p in passes], dtype=np.float64) / memory_rate
    launches = np.array([p.launches for p in passes], dtype=np.float64) * device.launch_s
    return np.maximum(_compute_seconds(passes, dtypes, device), moved) + launches


def _compute_seconds(passes: Sequence[Pass], dtypes: Sequence[str], device: Device) -> Seconds:
    owner = [i for i, p in enumerate(passes) for _ in p.gemms]
    if not owner:
        return np.zeros(len(passes))
    rates = {dtype: flop_rate(device, dtype) for dtype in {dtypes[i] for i in owner}}
    rate = np.array([rates[dtypes[i]] for i in owner])
    batch, m, n, k, flops = np.array([g for p in passes for g in p.gemms], dtype=np.float64).T
    seconds = flops / (rate * gemm_fill(batch, m, n, k, RAMPS[device.backend]))
    total = np.zeros(len(passes))
    np.add.at(total, owner, seconds)
    return total


def flop_rate(device: Device, dtype: str) -> float:
    """FLOP/s that large products of `dtype` reach. Raises ConfigError when the device has no figure for it."""
    peak = device.peak_flops_per_s.get(dtype)
    if not peak:
        known = ", ".join(sorted(device.peak_flops_per_s))
        raise ConfigError(f"device {device.name!r} has no peak FLOP/s for {dtype}; it has {known}. Choose one.")
    return peak * device.efficiency.get(dtype, DEFAULT_EFFICIENCY)
