"""A device "profiled" at some rows: its constants moved to them, and what they say beyond."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.measure.models.covariance import Labels, Where
from autopar.measure.models.device import DeviceModel
from autopar.measure.models.fits import FORMS, Fit, Fits
from autopar.measure.models.form import Array, Sizes
from autopar.measure.models.residual import Residual
from autopar.measure.models.solve import solve
from autopar.validation.calls import Call, columns, measured

LEAST_REFIT, LEAST_RESIDUAL = 5, 5
"""Rows of a variant from which its constants are fitted anew, and of a family from which a residual is."""

COMPUTING = ("gemm", "attention")
"""Families whose constants are: those of others are few, or levels of which timings of the very call say more."""

REFIT_WEIGHT = 0.2
"""Weight of a row then: few rows tell constants apart worse than many, of which what was expected is made."""

MEASURED_ERROR, REFITTED_ERROR = 0.03, 0.1
"""Errors to expect of a row that was itself timed, and of constants that few rows moved."""

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
            seconds = seconds * np.exp(self.residuals[group].at(where(self.model, group, calls)))
        return seconds


def form_seconds(model: DeviceModel, group: Group, calls: Sequence[Call]) -> Array:
    """Seconds by the forms alone, each call by the nearest of its variants that is known."""
    return _by_variants(calls, lambda sizes, variants: model.seconds(group[0], sizes, group[1], variants))


def _by_variants(calls: Sequence[Call], priced: Callable[[Sizes, tuple[str, ...]], Array]) -> Array:
    """What `priced` says of calls, in their order, asked once for all of the same variants."""
    members: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        members[call.variants].append(i)
    parts = [priced(columns([calls[i] for i in chosen]), variants) for variants, chosen in members.items()]
    order = np.argsort(np.concatenate([*members.values()]), kind="stable")
    result: Array = np.concatenate(parts)[order]
    return result


def profiled(model: DeviceModel, rows: Sequence[Call]) -> ProfiledModel:
    """The model of a device after timing `rows` on it."""
    groups: dict[Group, list[Call]] = defaultdict(list)
    for call in rows:
        groups[call.family, call.dtype].append(call)
    refitted = [fit for group, calls in groups.items() if group[0] in COMPUTING for fit in _refit(model, group, calls)]
    own = Fits(model.own.device, model.own.table | Fits.of("", refitted).table)
    result = ProfiledModel(DeviceModel(model.device, own, model.others, few=not model.own.table))
    for group, calls in groups.items():
        if len(calls) >= LEAST_RESIDUAL:
            beyond = np.log(measured(calls) / form_seconds(result.model, group, calls))
            residual = Residual.through(where(result.model, group, calls), beyond)
            result.residuals |= {group: residual} if residual.says_something else {}
        for call in calls:
            result.timed[same_call(call)] = call.measured_s or 0.0
    return result


def same_call(call: Call) -> tuple[object, ...]:
    """What equal calls, timed by the same software, have in common."""
    return (call.source, *call.key)


def _refit(model: DeviceModel, group: Group, calls: Sequence[Call]) -> list[Fit]:
    """Constants of each variant with enough rows, the widest first.

    They are expected near those of the variant elsewhere; of one that is not known, near those of a wider one, as far
    as its rows have moved them.
    """
    form, members = FORMS[group[0]], defaultdict[str, list[Call]](list)
    for call in calls:
        for variant in dict.fromkeys(call.variants):
            members[variant].append(call)
    fits, moved = list[Fit](), dict[str, Array]()
    for variant, chosen in sorted(members.items(), key=lambda item: -item[1][0].variants.index(item[0])):
        names = chosen[0].variants
        known = model.known(*group, (variant, *names))
        if len(chosen) < LEAST_REFIT or known.source == "fitted":
            continue  # what is left to do the residual does
        before = form.plain(known.values)
        wider = next((moved[v] for v in names[names.index(variant) + 1 :] if v in moved), np.zeros_like(before))
        expected = form.values(before if model.knows(*group, variant) else before + wider)
        sizes, weight = columns(chosen), np.full(len(chosen), REFIT_WEIGHT)
        beyond = form.beyond.at(known.beyond, sizes) if form.beyond and len(known.beyond) else 0.0
        by_form = measured(chosen) / np.exp(beyond)
        found = solve(form, sizes, model.hardware(group[1]), by_form, weight, expected)
        moved[variant] = form.plain(found) - before
        fits.append(Fit(*group, variant, len(chosen), REFITTED_ERROR, tuple(found), tuple(known.beyond)))
    return fits


def where(model: DeviceModel, group: Group, calls: Sequence[Call]) -> Where:
    """What makes calls alike: logarithms of their sizes, software, and the ways of other devices in computing them."""
    sizes = {name: column for name, column in columns(calls).items() if name not in ("closed_s", "link_s")}
    logs = [np.log(np.maximum(column, 1e-9)) for name, column in sizes.items() if name not in ("causal", "rows")]
    marks = [2.0 * sizes["causal"]] if "causal" in sizes else []
    if "rows" in sizes:
        marks = [np.log(np.maximum(sizes["rows"], 1.0))]
    seconds = form_seconds(model, group, calls)
    ways = np.zeros((len(calls), 0))
    if group[0] in COMPUTING:
        marks.append(np.log(seconds))
        elsewhere = _by_variants(calls, lambda sizes, variants: model.elsewhere(group[0], sizes, group[1], variants))
        ways = np.log(elsewhere / seconds[:, None])
    return Where(np.stack(logs + marks, axis=1), _labels(calls), np.nan_to_num(ways))


def _labels(calls: Sequence[Call]) -> Labels:
    """The variants of each call, without the one of all calls; its source, with versions, and release; its operator."""
    return np.array([
        [*([v for v in call.variants if v] or [""]), call.source, "/".join(call.source.split("/")[:2]), call.op,
         f"{call.op} {call.source}"]
        for call in calls
    ])  # fmt: skip
