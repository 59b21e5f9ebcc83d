"""A device "profiled" at some rows: its constants moved to them, and what they say beyond."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.measure.models.device import DeviceModel
from autopar.measure.models.fits import FORMS, Fit, Fits
from autopar.measure.models.form import Array
from autopar.measure.models.residual import Labels, Residual
from autopar.measure.models.solve import solve
from autopar.validation.calls import Call, columns, measured

LEAST_REFIT, LEAST_RESIDUAL = 5, 12
"""Rows of a variant from which its constants are fitted anew, and of a family from which a residual is."""

MEASURED_ERROR, PROFILED_ERROR = 0.03, 0.06
"""Errors to expect of a row that was itself timed, and of a profiled family."""

Group = tuple[str, str]
"""Family and dtype."""


@dataclass
class ProfiledModel:
    """Prices calls of one device by its model and, where there is one, the residual of the family and dtype.

    `timed` are the seconds of the very rows that were timed.
    """

    model: DeviceModel
    residuals: dict[Group, Residual] = field(default_factory=dict)
    timed: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, group: Group, calls: Sequence[Call]) -> Array:
        """Seconds of calls of one family and dtype, shape (calls,)."""
        seconds = form_seconds(self.model, group, calls)
        if group in self.residuals:
            seconds = seconds * np.exp(self.residuals[group].at(places(calls), labels(calls)))
        return seconds


def form_seconds(model: DeviceModel, group: Group, calls: Sequence[Call]) -> Array:
    """Seconds by the forms alone, each call by the nearest of its variants that is known."""
    seconds = np.zeros(len(calls))
    members: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        members[call.variants].append(i)
    for variants, chosen in members.items():
        seconds[chosen] = model.seconds(group[0], columns([calls[i] for i in chosen]), group[1], variants)
    return seconds


def profiled(model: DeviceModel, rows: Sequence[Call]) -> ProfiledModel:
    """The model of a device after timing `rows` on it."""
    groups: dict[Group, list[Call]] = defaultdict(list)
    for call in rows:
        groups[call.family, call.dtype].append(call)
    refitted = [fit for group, calls in groups.items() for fit in _refit(model, group, calls)]
    own = Fits(model.own.device, model.own.table | Fits.of("", refitted).table)
    result = ProfiledModel(DeviceModel(model.device, own, model.others, few=not model.own.table))
    for group, calls in groups.items():
        if len(calls) >= LEAST_RESIDUAL:
            beyond = np.log(measured(calls) / form_seconds(result.model, group, calls))
            result.residuals[group] = Residual.through(places(calls), labels(calls), beyond)
        for call in calls:
            result.timed[same_call(call)] = call.measured_s or 0.0
    return result


def same_call(call: Call) -> tuple[object, ...]:
    """What equal calls, timed by the same software, have in common."""
    return (call.source, *call.key)


def _refit(model: DeviceModel, group: Group, calls: Sequence[Call]) -> list[Fit]:
    """Constants of each variant with enough rows, expected near what the model says of it."""
    members: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        for variant in dict.fromkeys(call.variants):
            members[variant].append(call)
    fits = []
    for variant, chosen in members.items():
        known = model.known(*group, (variant, *chosen[0].variants))
        if len(chosen) >= LEAST_REFIT and known.source != "fitted":  # else the residual does what is left to do
            weight = np.ones(len(chosen))
            form, sizes = FORMS[group[0]], columns(chosen)
            beyond = form.beyond.at(known.beyond, sizes) if form.beyond and len(known.beyond) else 0.0
            by_form = measured(chosen) / np.exp(beyond)
            found = solve(form, sizes, model.hardware(group[1]), by_form, weight, known.values)
            fits.append(Fit(*group, variant, len(chosen), PROFILED_ERROR, tuple(found), tuple(known.beyond)))
    return fits


def places(calls: Sequence[Call]) -> Array:
    """Logarithms of the sizes of calls, shape (calls, features): what makes two calls alike."""
    sizes = {name: column for name, column in columns(calls).items() if name not in ("closed_s", "link_s")}
    logs = [np.log(np.maximum(column, 1e-9)) for name, column in sizes.items() if name not in ("causal", "rows")]
    marks = [2.0 * sizes["causal"]] if "causal" in sizes else []
    if "rows" in sizes:
        marks = [np.log(np.maximum(sizes["rows"], 1.0))]
    return np.stack(logs + marks, axis=1)


def labels(calls: Sequence[Call]) -> Labels:
    """The variants of each call, without the one of all calls."""
    return np.array([[v for v in call.variants if v] or [""] for call in calls])
