"""Fit the device models to published timings and write `profiles/fits/`.

python -m benchmarks.fit_ops FOLDER_OF_ops_TABLES
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopar.cluster import profiles_folder
from autopar.measure.models.device import DeviceModel
from autopar.measure.models.fits import FORMS, Fit, Fits, write_fits
from autopar.measure.models.form import Array
from autopar.measure.models.solve import solve
from autopar.rows import OP_KINDS, read_tables
from autopar.validation.calls import Call, base_device, columns, measured, read_calls

SOURCES = ("aiconfigurator/", "vidur/", "neusight", "aceso-superscaler", "cudnn-frontend/", "liger/")
"""Published under Apache-2.0, MIT or BSD-2, so constants fitted to them may be shipped."""

HELD_OUT = 0.25
"""Share of shapes by which errors are told, left out of the fit that tells them."""

MOST, LEAST = 4000, 30
"""Timings a fit uses at most, and needs at least."""

BETTER = 0.97
"""A variant has a fit of its own where its error is less than so much of a wider fit's."""

UNUSUAL = ("custom_allreduce", "nvlink-pair", "vidur")
"""Marks of collectives that don't stand for all of their kind: inference's own kernels, nodes joined in pairs only, and
timings of some kinds alone, beside which the other kinds' would not compare."""

INDEPENDENT = 200.0
"""Timings that count as so many at most: what a form gets wrong it gets wrong for many alike."""

UNUSUAL_WEIGHT = 0.15
"""Weight of calls smaller than those of training."""


def fit_device(name: str, calls: Sequence[Call]) -> Fits:
    """All fits of one device."""
    groups: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in calls:
        for variant in call.variants:
            if variant != call.variants[-1] or _general(call):
                groups[call.family, call.dtype, variant].append(call)
    kept: dict[tuple[str, str, str], Fit] = {}
    for key, members in sorted(groups.items(), key=lambda item: -_generality(item[0], item[1][0])):
        if len(members) >= LEAST:
            fit = _fit(*key, members)
            if _says_more(fit, members, kept):
                kept[key] = fit
    return Fits.of(name, kept.values())


def _generality(key: tuple[str, str, str], call: Call) -> int:
    return call.variants.index(key[2])


def _says_more(fit: Fit, calls: list[Call], kept: dict[tuple[str, str, str], Fit]) -> bool:
    """Whether a fit explains its calls clearly better than the nearest wider one that is kept."""
    wider = calls[0].variants[_generality((fit.family, fit.dtype, fit.variant), calls[0]) + 1 :]
    found = (kept.get((fit.family, fit.dtype, variant)) for variant in wider)
    nearest = next((other for other in found if other), None)
    if nearest is None:
        return True
    own, wide = (np.abs(_beyond(f.family, f.dtype, np.array(f.constants), calls)).mean() for f in (fit, nearest))
    return bool(own < BETTER * wide)


def _general(call: Call) -> bool:
    """Whether a call is one of those that stand for all: attention and collectives as training has them, no norms."""
    if call.family == "attention":
        return "context" in call.variants[0]
    if call.family == "collectives":
        return not any(mark in call.variants[0] for mark in UNUSUAL)
    return call.sizes.get("rows", 0) == 0


def _fit(family: str, dtype: str, variant: str, calls: list[Call]) -> Fit:
    order = np.random.default_rng(0).permutation(len(calls))
    calls = [calls[i] for i in order[: MOST * 2]]
    kept = [call for call in calls if shape_number(call) >= HELD_OUT]
    rest = [call for call in calls if shape_number(call) < HELD_OUT and call.usual]
    error = _error(family, dtype, _constants(family, dtype, kept[:MOST]), rest) if kept and rest else 0.3
    return Fit(family, dtype, variant, len(calls), error, tuple(_constants(family, dtype, calls[:MOST])))


def _constants(family: str, dtype: str, calls: list[Call]) -> Array:
    weight = np.array([1.0 if call.usual else UNUSUAL_WEIGHT for call in calls])
    weight *= min(1.0, INDEPENDENT / weight.sum())
    return solve(FORMS[family], columns(calls), _model(calls[0]).hardware(dtype), measured(calls), weight)


def _error(family: str, dtype: str, constants: Array, calls: list[Call]) -> float:
    return float(np.abs(np.expm1(_beyond(family, dtype, constants, calls))).mean())


def _beyond(family: str, dtype: str, constants: Array, calls: list[Call]) -> Array:
    """Logarithm of predicted over measured seconds, shape (calls,)."""
    predicted = FORMS[family].seconds(constants, columns(calls), _model(calls[0]).hardware(dtype))
    return np.log(predicted / measured(calls))


def _model(call: Call) -> DeviceModel:
    return DeviceModel(base_device(call.device), Fits.of("", ()))


def shape_number(call: Call) -> float:
    """A number in [0, 1) that is equal for equal shapes."""
    return zlib.crc32(repr(call.key).encode()) / 2**32


def published(folder: Path) -> dict[str, list[Call]]:
    """All calls by device whose timings may be used."""
    by_device: dict[str, list[Call]] = defaultdict(list)
    for table in read_tables([folder / f"ops_{kind}.csv.gz" for kind in OP_KINDS], OP_KINDS):
        for call in read_calls(table):
            if isinstance(call, Call) and call.measured_s and call.source.startswith(SOURCES):
                by_device[call.device.name].append(call)
    return by_device


def main(folder: Path) -> None:
    """Fit every device of the tables and write its file."""
    target = profiles_folder() / "fits"
    target.mkdir(exist_ok=True)
    for name, calls in sorted(published(folder).items()):
        fits = fit_device(name, calls)
        if fits.table:
            named = sorted({call.source.split("/")[0] for call in calls})
            header = f"Written by `python -m benchmarks.fit_ops` from timings published by {', '.join(named)}."
            write_fits(fits, target / f"{name}.toml", header)
        print(f"{name:20s}{len(calls):8d} timings{len(fits.table):5d} fits", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
