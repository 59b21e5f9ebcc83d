"""Seconds of local work from device models (`measure/models`): fitted where timings were published, else by datasheet.

The pricer turns keys into columns of numbers and asks the models once for all of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autopar.cluster import Cluster, Device
from autopar.cost.collectives import fitted_times
from autopar.cost.passes import Pass
from autopar.cost.pricer import CollectiveTimes, OpTimes, Seconds, Source
from autopar.cost.work import work
from autopar.errors import ConfigError
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.models.device import DeviceModel, device_model
from autopar.measure.models.fits import FORMS
from autopar.measure.models.form import FASTER


@dataclass(frozen=True)
class RooflinePricer:
    """Prices everything from the cluster's figures and the constants fitted to devices; each source says which."""

    cluster: Cluster
    _known: dict[OpKey, tuple[float, float, Source]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """None beside what every source `roofline` says."""
        return ()

    def identity(self) -> str:
        """Hash of the cluster's figures and of the constants that stand for it."""
        model = model_of(self.cluster.device)
        text = f"{self.cluster!r} {sorted(model.own.table.items())!r} {model.others!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op, forward and backward. Raises ConfigError for a dtype the device has no rate for."""
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            self._known.update(zip(new, self._priced(new), strict=True))
        prices = [self._known[key] for key in keys]
        seconds = np.array([price[:2] for price in prices], dtype=np.float64).reshape(-1, 2)
        return OpTimes(seconds[:, 0], seconds[:, 1], [price[2] for price in prices])

    def _priced(self, keys: Sequence[OpKey]) -> Iterator[tuple[float, float, Source]]:
        forward, backward = _Passes(), _Passes()
        for key in keys:
            found = work(key)
            forward.add(found.forward, found.dtype, found.kind)
            backward.add(found.backward, found.dtype, found.kind)
        model = model_of(self.cluster.device)
        seconds = (forward.seconds(model).tolist(), backward.seconds(model).tolist())
        return zip(*seconds, forward.sources(model), strict=True)

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective: in closed form, times what was fitted of the device's links."""
        return fitted_times(keys, self.cluster, model_of(self.cluster.device))


@lru_cache(maxsize=64)
def model_of(device: Device) -> DeviceModel:
    """The model of a device, made once."""
    return device_model(device)


Row = tuple[float, ...]

COLUMNS = {
    "gemm": ("m", "n", "k", "batch", "bytes"),
    "attention": ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal", "passes"),
    "elementwise": ("bytes", "rows"),
}


def kernels_of(one: Pass, kind: str) -> list[tuple[str, str, Row]]:
    """The kernels of a pass that device models know: family, variant and sizes; what has no products moves bytes."""
    kernels: list[tuple[str, str, Row]] = [("gemm", "", gemm[:5]) for gemm in one.gemms]
    kernels += [("attention", "", call[:8]) for call in one.attention]
    if kernels or not (isinstance(one.bytes, np.ndarray) or one.bytes):
        return kernels
    return [("elementwise", kind, (one.bytes, one.rows))]


class _Passes:
    """Columns of many passes: plain numbers only, which keeps the garbage collector out of the way."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: dict[tuple[str, str, str], list[Row]] = defaultdict(list)  # by family, dtype, variant
        self.owners: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        self.launches: list[int] = []  # of kernels that no row stands for
        self.host_bytes: list[float] = []

    def add(self, one: Pass, dtype: str, kind: str) -> None:
        kernels = kernels_of(one, kind)
        for family, variant, row in kernels:
            self.rows[family, dtype, variant].append(row)
            self.owners[family, dtype, variant].append(self.count)
        self.launches.append(max(0, one.launches - len(kernels)))
        self.host_bytes.append(one.host_bytes)
        self.count += 1

    def seconds(self, model: DeviceModel) -> Seconds:
        """Seconds of each pass, shape (passes,)."""
        total = np.array(self.launches, dtype=np.float64) * model.device.launch_s
        total += np.array(self.host_bytes, dtype=np.float64) / model.device.host_bytes_per_s
        for (family, dtype, variant), rows in self.rows.items():
            if family != "elementwise":
                require_rate(model.device, dtype)
            columns = np.array(rows, dtype=np.float64).T
            sizes = dict(zip(COLUMNS[family], columns, strict=True))
            np.add.at(total, self.owners[family, dtype, variant], model.seconds(family, sizes, dtype, (variant, "")))
        return total

    def sources(self, model: DeviceModel) -> list[Source]:
        """Where the seconds of each pass are from; of those without work, the datasheet."""
        found: list[Source] = ["roofline"] * self.count
        for (family, dtype, variant), owners in self.owners.items():
            source = model.known(family, dtype, (variant, "")).source
            for owner in owners:
                found[owner] = source
        return found


def require_rate(device: Device, dtype: str) -> float:
    """Peak FLOP/s of `dtype`. Raises ConfigError when the device has no figure for it."""
    peak = device.peak_flops_per_s.get(dtype)
    if not peak:
        known = ", ".join(sorted(device.peak_flops_per_s))
        raise ConfigError(f"device {device.name!r} has no peak FLOP/s for {dtype}; it has {known}. Choose one.")
    return peak


def flop_rate(device: Device, dtype: str) -> float:
    """FLOP/s that no product and no attention of `dtype` exceeds, as they are priced here. Raises ConfigError."""
    require_rate(device, dtype)
    model = model_of(device)
    rates = (form.limit.rate(model.known(form.family, dtype).values, model.hardware(dtype))
             for form in FORMS.values() if form.limit)  # fmt: skip
    return FASTER * device.speed * max(rates)
