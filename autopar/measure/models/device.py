"""Seconds of calls on a device: by its own fitted constants, else by those of devices like it, else by datasheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, log
from typing import Literal

import numpy as np

from autopar.architecture import ARCHITECTURES, distance
from autopar.cluster import Device, DeviceFile, all_devices
from autopar.graph import DTYPE_BYTES
from autopar.measure.models.fits import FORMS, Fit, Fits, shipped_fits
from autopar.measure.models.form import Array, Form, Hardware, Sizes

DEFAULT_EFFICIENCY = 0.7
"""Share of a peak assumed where the device file gives none."""

NARROWING = 2.0
"""How quickly devices that are less alike lose their say: by exp(this) a generation."""

USUAL_ERROR = 0.05
"""Added to a fit's own error when fits are weighed."""

TRUST, POWER = 0.5, 0.5
"""Powers of the ratios of the files' efficiencies and of fewer watts for a FLOP/s by which shares are carried over."""

WITNESS, CAUTION = 0.3, 1.1
"""Weight of the device file's own share beside what is carried over, and what is reached of it: files are cautious."""

CARRIED = 0.5
"""Share of what others' timings say beyond the form that is carried over."""

OTHER_DTYPE = 3.0
"""How many generations further a fit of another dtype is."""

OWN_ONLY = ("encoder_attention",)
"""Marks of variants for which libraries choose another kernel on each device: they are not carried over."""

TRANSFERRED_ERROR, GUESSED_ERROR = 0.2, 0.4
"""Errors to expect of constants of devices alike, and of none."""

TILES = {"cuda": 64, "cpu": 8}
UNITS = {"cuda": 100, "cpu": 1}
"""Of a device whose file doesn't say how many."""


@dataclass(frozen=True)
class Known:
    """Values of a form's constants, coefficients beyond it, where they are from, and the error to expect."""

    values: Array
    beyond: Array
    source: Literal["fitted", "roofline"]
    error: float


@dataclass(frozen=True)
class Other:
    """A device whose fits may stand for another's; by dtype the shares of peak in its file, and watts for a FLOP/s."""

    architecture: str
    fits: Fits
    efficiency: Mapping[str, float]
    watts: Mapping[str, float]


@dataclass
class DeviceModel:
    """Prices calls on `device`. `own` are its fits, `others` those of devices that may stand for it.

    Where its own are of `few` timings they don't stand for variants of calls that are known of other devices.
    """

    device: Device
    own: Fits
    others: tuple[Other, ...] = ()
    few: bool = False
    _known: dict[tuple[str, str, tuple[str, ...]], Known] = field(default_factory=dict)

    def hardware(self, dtype: str) -> Hardware:
        """What forms need to know of the device; its peak is 1 FLOP/s for a dtype it has no figure for."""
        device = self.device
        return Hardware(
            flops_per_s=device.peak_flops_per_s.get(dtype, 1.0),
            bytes_per_s=device.memory_bytes_per_s,
            units=device.units or UNITS[device.backend],
            element_bytes=0.5 if dtype.startswith("float4") else DTYPE_BYTES.get(dtype, 4),
            launch_s=device.launch_s,
            tile=TILES[device.backend],
        )

    def seconds(self, family: str, sizes: Sizes, dtype: str, variants: Sequence[str] = ("",)) -> Array:
        """Seconds of calls, shape (calls,), by the first of `variants` that is known."""
        known = self.known(family, dtype, variants)
        usual = FORMS[family].priced(known.values, known.beyond, sizes, self.hardware(dtype))
        return usual if self.device.speed == 1.0 or family == "collectives" else usual / self.device.speed

    def known(self, family: str, dtype: str, variants: Sequence[str] = ("",)) -> Known:
        """The constants that stand for calls of the first of `variants` that is known."""
        key = (family, dtype, tuple(variants))
        if key not in self._known:
            self._known[key] = self._find(FORMS[family], dtype, variants)
        return self._known[key]

    def knows(self, family: str, dtype: str, variant: str) -> bool:
        """Whether constants of just this variant are known, of this device or of others."""
        return bool(self.own.find(family, dtype, variant) or self._elsewhere(family, dtype, (variant,)))

    def _find(self, form: Form, dtype: str, variants: Sequence[str]) -> Known:
        if fit := self._own(form.family, dtype, variants):
            return Known(np.array(fit.constants), np.array(fit.beyond), "fitted", fit.error)
        if there := self._elsewhere(form.family, dtype, variants):
            return Known(*self._transferred(form, dtype, there), "roofline", TRANSFERRED_ERROR)
        return Known(self._guess(form, dtype), np.zeros(0), "roofline", GUESSED_ERROR)

    def _own(self, family: str, dtype: str, variants: Sequence[str]) -> Fit | None:
        for variant in variants:
            if fit := self.own.find(family, dtype, variant):
                return fit
            if self.few and self._elsewhere(family, dtype, (variant,)):
                return None
        return None

    def elsewhere(self, family: str, sizes: Sizes, dtype: str, variants: Sequence[str]) -> Array:
        """Seconds of calls here by the constants of each other device, shape (calls, others); NaN where it has none."""
        form, hardware = FORMS[family], self.hardware(dtype)
        fits = [other.fits.nearest(family, dtype, variants) for other in self.others]
        none = np.full(len(next(iter(sizes.values()))), np.nan)
        columns = [form.priced(np.array(f.constants), np.array(f.beyond), sizes, hardware) if f else none for f in fits]
        return np.stack(columns, axis=1) if columns else none[:, None][:, :0]

    def _elsewhere(self, family: str, dtype: str, variants: Sequence[str]) -> list[tuple[Other, Fit]]:
        carried = [v for v in variants if not any(mark in v for mark in OWN_ONLY)]
        found = [(other, other.fits.nearest(family, dtype, carried)) for other in self.others]
        return [(other, fit) for other, fit in found if fit]

    def _guess(self, form: Form, dtype: str) -> Array:
        """The form's own start, with the shares that the device file says."""
        shares = self.device.efficiency
        said = {"share": shares.get(dtype, DEFAULT_EFFICIENCY), "memory": shares.get("memory", DEFAULT_EFFICIENCY)}
        return form.start(**said)

    def _transferred(self, form: Form, dtype: str, there: Sequence[tuple[Other, Fit]]) -> tuple[Array, Array]:
        """The mean of others' constants on the scales on which they are fitted, by likeness and by how well they fit.

        Beyond the form half of their mean.
        """
        here = self.device.architecture
        apart = np.array([
            distance(here, other.architecture, form.family) + OTHER_DTYPE * (fit.dtype != dtype) for other, fit in there
        ])  # fmt: skip
        weights = np.exp(-NARROWING * apart) / np.array([fit.error + USUAL_ERROR for _, fit in there]) ** 2
        plain = np.array([form.plain(np.array(fit.constants)) for _, fit in there])
        mean = np.average(plain, axis=0, weights=weights)
        if form.constants[0].name == "share":
            mean[0] = log(self._share(form, dtype, there, weights))
        terms = len(form.beyond.powers) if form.beyond else 0
        beyond = np.average([fit.beyond or np.zeros(terms) for _, fit in there], axis=0, weights=weights)
        return form.values(mean), CARRIED * beyond

    def _share(self, form: Form, dtype: str, there: Sequence[tuple[Other, Fit]], weights: Array) -> float:
        """The share of peak: that of others, moved by what the files say and by power; for products with the file's."""
        said = self.device.efficiency.get(dtype, DEFAULT_EFFICIENCY)
        maker = ARCHITECTURES[self.device.architecture].maker
        best = max((fit.constants[0] for o, fit in there if ARCHITECTURES[o.architecture].maker == maker), default=1.0)
        logs = [
            self._powered(dtype, other, log(fit.constants[0]), log(best))
            + TRUST * log(said / other.efficiency.get(dtype, DEFAULT_EFFICIENCY))
            for other, fit in there
        ]
        witness = WITNESS if form.family == "gemm" else 0.0  # the file's shares are those of products
        return exp((1 - witness) * float(np.average(logs, weights=weights)) + witness * log(CAUTION * said))

    def _powered(self, dtype: str, other: Other, share: float, best: float) -> float:
        """Logarithm of another's share with this board's watts for each FLOP/s of peak.

        With fewer than the other it loses clocks. With more it keeps them as far as the `best` of its maker does, if it
        runs the same kernels; of plain float32, which no generation has other units for, fewer count everywhere.
        """
        watts, here, there = _watts(self.device, dtype), self.device.architecture, other.architecture
        if not (watts and other.watts.get(dtype)):
            return share
        more, own, its = log(watts / other.watts[dtype]), ARCHITECTURES[here], ARCHITECTURES[there]
        if own.kernels == its.kernels:
            return share + (POWER * more if more < 0 else min(more, max(0.0, best - share)))
        return share + (POWER * min(0.0, more) if dtype == "float32" and own.maker == its.maker else 0.0)


def _watts(device: Device, dtype: str) -> float:
    """Watts for each FLOP/s of peak; 0 where the file has no power."""
    return (device.power_w or 0.0) / device.peak_flops_per_s.get(dtype, 1.0)


def device_model(device: Device, without: Iterable[str] = (), shipped: Mapping[str, Fits] | None = None) -> DeviceModel:
    """The model of a device from fits (the `shipped` ones), leaving out those of devices named in `without`."""
    left_out, known = frozenset(without), shipped_fits() if shipped is None else shipped
    own = known.get(device.fits) if device.fits not in left_out else None
    others = tuple(
        Other(file.architecture, known[name], file.efficiency, {d: _watts(file.device(), d) for d in file.peak_tflops})
        for name, file in _files().items()
        if device.architecture in ARCHITECTURES and name in known and name not in left_out | {device.fits}
    )
    return DeviceModel(device, own or Fits.of(device.name, ()), others)


@cache
def _files() -> dict[str, DeviceFile]:
    return {file.name: file for file in all_devices() if file.architecture in ARCHITECTURES}
