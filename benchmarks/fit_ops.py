"""Fit the device models to published timings and write `profiles/fits/`.

python -m benchmarks.fit_ops FOLDER_OF_ops_TABLES
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
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

MOST, LEAST = 4000, {"collectives": 10}
"""Timings a fit uses at most, and needs at least (else 30): a collective's curve stays near a wider one's."""

BETTER = 0.97
"""A variant has a fit of its own where its error is less than so much of a wider fit's."""

UNUSUAL = ("custom_allreduce", "nvlink-pair", "vidur")
"""Marks of collectives that don't stand for all of their kind: inference's own kernels, nodes joined in pairs only, and
timings of some kinds alone, beside which the other kinds' would not compare."""

LEAST_BEYOND = 100
"""Usual timings from which a fit has coefficients beyond its form."""

INDEPENDENT = 200.0
"""Timings that count as so many at most: what a form gets wrong it gets wrong for many alike."""

UNUSUAL_WEIGHT = 0.15
"""Weight of calls smaller than those of training."""


def fit_device(name: str, calls: Sequence[Call]) -> Fits:
    """All fits of one device."""
    groups: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in calls:
        for variant in dict.fromkeys(call.variants):
            if variant != call.variants[-1] or _general(call):
                groups[call.family, call.dtype, variant].append(call)
    kept: dict[tuple[str, str, str], Fit] = {}
    for key, members in sorted(groups.items(), key=lambda item: -_generality(item[0], item[1][0])):
        if len(members) >= LEAST.get(key[0], 30):
            wider = _wider(key, members[0], kept)
            fit = _fit(*key, members, wider)
            if wider is None or _says_more(fit, wider, members):
                kept[key] = fit
    return Fits.of(name, kept.values())


def _generality(key: tuple[str, str, str], call: Call) -> int:
    return call.variants.index(key[2])


def _wider(key: tuple[str, str, str], call: Call, kept: dict[tuple[str, str, str], Fit]) -> Fit | None:
    """The nearest fit of more calls that is kept."""
    found = (kept.get((*key[:2], variant)) for variant in call.variants[_generality(key, call) + 1 :])
    return next((fit for fit in found if fit), None)


def _says_more(fit: Fit, wider: Fit, calls: list[Call]) -> bool:
    """Whether a fit explains its calls clearly better than a wider one."""
    own, wide = (np.abs(_beyond(f, calls)).mean() for f in (fit, wider))
    return bool(own < BETTER * wide)


def _general(call: Call) -> bool:
    """Whether a call is one of those that stand for all: attention and collectives as training has them, no norms."""
    if call.family == "attention":
        return "context" in call.variants[0]
    if call.family == "collectives":
        return not any(mark in call.variants[0] for mark in UNUSUAL)
    return call.sizes.get("rows", 0) == 0


def _fit(family: str, dtype: str, variant: str, calls: list[Call], wider: Fit | None) -> Fit:
    order = np.random.default_rng(0).permutation(len(calls))
    calls = [calls[i] for i in order[: MOST * 2]]
    rest = [call for call in calls if _tells_error(call) and call.usual]
    kept = [call for call in calls if not _tells_error(call)]
    error = _error(_solved(family, dtype, variant, kept[:MOST], wider), rest) if kept and rest else 0.3
    return replace(_solved(family, dtype, variant, calls[:MOST], wider), points=len(calls), error=error)


def _tells_error(call: Call) -> bool:
    """Whether a call is left out of the fit that tells a fit's error: a quarter of shapes, of any choice of shapes."""
    return bool(shape_number(call) * 64 % 1 < HELD_OUT)


def _solved(family: str, dtype: str, variant: str, calls: list[Call], wider: Fit | None) -> Fit:
    """Constants, near those of a wider fit, and coefficients beyond the form where usual calls are many."""
    expected = np.array(wider.constants) if wider else None
    fit = Fit(family, dtype, variant, len(calls), 0.0, tuple(_constants(family, dtype, calls, expected)))
    usual, beyond = [call for call in calls if call.usual], FORMS[family].beyond
    if beyond is None or len(usual) < LEAST_BEYOND:
        return fit
    return replace(fit, beyond=tuple(beyond.through(columns(usual), -_beyond(fit, usual)).tolist()))


def _constants(family: str, dtype: str, calls: list[Call], expected: Array | None) -> Array:
    weight = np.array([1.0 if call.usual else UNUSUAL_WEIGHT for call in calls])
    weight *= min(1.0, INDEPENDENT / weight.sum())
    return solve(FORMS[family], columns(calls), _model(calls[0]).hardware(dtype), measured(calls), weight, expected)


def _error(fit: Fit, calls: list[Call]) -> float:
    return float(np.abs(np.expm1(_beyond(fit, calls))).mean())


def _beyond(fit: Fit, calls: list[Call]) -> Array:
    """Logarithm of predicted over measured seconds, shape (calls,)."""
    hardware = _model(calls[0]).hardware(fit.dtype)
    predicted = FORMS[fit.family].priced(np.array(fit.constants), np.array(fit.beyond), columns(calls), hardware)
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
