"""Fitted constants of devices: what a file of `profiles/fits` holds, and which of them stand for a call."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autopar.cluster import profiles_folder
from autopar.files import write_atomically
from autopar.measure.models.attention import ATTENTION
from autopar.measure.models.collective import COLLECTIVE
from autopar.measure.models.form import Form
from autopar.measure.models.gemm import GEMM
from autopar.measure.models.moving import MOVING

FORMS: dict[str, Form] = {form.family: form for form in (GEMM, ATTENTION, MOVING, COLLECTIVE)}

ALIKE = {
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "float8_e4m3fn": ("float8_e4m3fn",),
    "float4_e2m1fn_x2": ("float4_e2m1fn_x2", "float8_e4m3fn"),
}
"""Whose constants may stand for a dtype's, the nearest first; of others none but their own."""

ANY = ("bfloat16", "float16", "float32")
"""Of work that bytes limit, all may."""


NUMBERS = re.compile(r"\[(?: *-?\d[-+.\de]*,)* *-?\d[-+.\de]* *\]")
"""A list of numbers, of which files hold thousands: as a text in JSON it is read many times faster."""


@dataclass(frozen=True)
class Fit:
    """Constants of a form for calls of one variant: `points` timings, `error` the mean one on those held out.

    `beyond` are coefficients of the form's polynomial, none where there are few timings.
    """

    family: str
    dtype: str
    variant: str
    points: int
    error: float
    constants: tuple[float, ...]
    beyond: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fits:
    """All that is fitted of one device, by (family, dtype, variant); '' is the variant of calls in general."""

    device: str
    table: dict[tuple[str, str, str], Fit]

    @classmethod
    def of(cls, device: str, fits: Iterable[Fit]) -> Fits:
        """A table of fits."""
        return cls(device, {(fit.family, fit.dtype, fit.variant): fit for fit in fits})

    def find(self, family: str, dtype: str, variant: str) -> Fit | None:
        """The fit of a variant for a dtype, or for the nearest that may stand for it."""
        found = (self.table.get((family, near, variant)) for near in alike(family, dtype))
        return next((fit for fit in found if fit), None)

    def nearest(self, family: str, dtype: str, variants: Sequence[str]) -> Fit | None:
        """The fit of the first of `variants` that has one."""
        return next((fit for variant in variants if (fit := self.find(family, dtype, variant))), None)


def alike(family: str, dtype: str) -> Sequence[str]:
    """Dtypes whose constants may stand for those of `dtype`."""
    if family == "elementwise":
        return (*ALIKE.get(dtype, (dtype,)), *ANY)
    return ALIKE.get(dtype, (dtype,))


def read_fits(path: Path) -> Fits:
    """The fits of a file; those whose form has other constants by now are left out."""
    data = tomllib.loads(NUMBERS.sub(r"'\g<0>'", path.read_text(encoding="utf-8")))
    rows = [Fit(**row | {name: _listed(row.get(name, ())) for name in ("constants", "beyond")}) for row in data["fit"]]
    return Fits.of(data["device"], (fit for fit in rows if _is_current(fit)))


def _listed(numbers: str | Sequence[float]) -> tuple[float, ...]:
    return tuple(json.loads(numbers) if isinstance(numbers, str) else numbers)


def _is_current(fit: Fit) -> bool:
    form = FORMS[fit.family]
    terms = len(form.beyond.powers) if form.beyond else 0
    return len(fit.constants) == len(form.constants) and len(fit.beyond) in (0, terms)


def write_fits(fits: Fits, path: Path, header: str) -> None:
    """Write a file of fits, `header` as its comment."""
    lines = [f"# {line}" for line in header.splitlines()] + [f'device = "{fits.device}"', ""]
    lines += [f"# {form.family}: {', '.join(c.name for c in form.constants)}" for form in FORMS.values()]
    lines += ["", "fit = ["]
    for fit in sorted(fits.table.values(), key=lambda f: (f.family, f.dtype, f.variant)):
        constants = ", ".join(f"{c:.4g}" for c in fit.constants)
        beyond = ", ".join(f"{c:.3f}" for c in fit.beyond)
        lines.append(
            f'  {{ family = "{fit.family}", dtype = "{fit.dtype}", variant = "{fit.variant}", points = {fit.points}, '
            f"error = {fit.error:.3f}, constants = [{constants}]" + (f", beyond = [{beyond}]" if beyond else "") + " },"
        )
    write_atomically(path, "\n".join([*lines, "]"]) + "\n")


@cache
def shipped_fits() -> dict[str, Fits]:
    """The fits that come with autopar, by device."""
    found = [read_fits(path) for path in sorted((profiles_folder() / "fits").glob("*.toml"))]
    return {fits.device: fits for fits in found}
