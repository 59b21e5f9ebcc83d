"""Predictions for rows of operator tables, with what is to be said of them all together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from autopar.measure.models.device import device_model
from autopar.measure.models.fits import Fits
from autopar.rows import Table
from autopar.validation.baseline import baseline_s
from autopar.validation.calls import Call, Skipped, base_device, known_device, read_calls
from autopar.validation.profiled import MEASURED_ERROR, ProfiledModel, profiled, same_call


@dataclass(frozen=True)
class Predicted:
    """One row of the answer; what can't be predicted has a `skipped_reason` and no figures."""

    index: int
    gpu: str = ""
    op: str = ""
    family: str = ""
    dtype: str = ""
    usual: bool = False
    predicted_us: float | None = None
    measured_us: float | None = None
    baseline_us: float | None = None
    ape: float | None = None
    baseline_ape: float | None = None
    expected_error: float | None = None
    source: str | None = None
    skipped_reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def predict(tables: Sequence[Table], fit: Sequence[Table] = (), exclude: Sequence[str] = ()) -> list[Predicted]:
    """Predict every row, in order. `fit`: rows timed on devices beforehand; `exclude`: devices whose fits aren't used.

    Raises ConfigError for an excluded device that is not known.
    """
    timed = [call for call in _all_calls(fit) if isinstance(call, Call) and call.measured_s]
    return predict_calls(_all_calls(tables), timed, exclude)


def predict_calls(
    calls: Sequence[Call | Skipped],
    timed: Sequence[Call] = (),
    exclude: Sequence[str] = (),
    shipped: Mapping[str, Fits] | None = None,
) -> list[Predicted]:
    """As `predict`, of calls read before; by the fits `shipped`, which are those that come with autopar."""
    left_out = {known_device(name).name for name in exclude}
    found: dict[int, Predicted] = {c.index: Predicted(c.index, skipped_reason=c.reason)
                                   for c in calls if isinstance(c, Skipped)}  # fmt: skip
    by_device: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if isinstance(call, Call):
            by_device[call.device.name].append(call)
    for name, members in by_device.items():
        model = device_model(base_device(members[0].device), left_out, shipped)
        on_device = profiled(model, [call for call in timed if call.device.name == name])
        for one in _predict_device(on_device, members):
            found[one.index] = one
    return [found[i] for i in sorted(found)]


def _all_calls(tables: Sequence[Table]) -> list[Call | Skipped]:
    calls: list[Call | Skipped] = []
    for table in tables:
        calls += read_calls(table, len(calls))
    return calls


def _predict_device(on_device: ProfiledModel, calls: Sequence[Call]) -> list[Predicted]:
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.family, call.dtype].append(call)
    found = []
    for group, members in groups.items():
        seconds = on_device.seconds(group, members)
        for call, predicted_s in zip(members, seconds.tolist(), strict=True):
            known = on_device.model.known(*group, call.variants)
            if timed_s := on_device.timed.get(same_call(call)):
                found.append(_with_errors(call, timed_s, "measured", MEASURED_ERROR))
            elif group in on_device.residuals:
                found.append(_with_errors(call, predicted_s, "fitted", on_device.residuals[group].error))
            else:
                found.append(_with_errors(call, predicted_s, known.source, known.error))
    return found


def _with_errors(call: Call, predicted_s: float, source: str, error: float) -> Predicted:
    plain_s = baseline_s(call)
    row = Predicted(
        call.index, call.device.name, call.op, call.family, call.dtype, call.usual, predicted_s * 1e6,
        baseline_us=plain_s * 1e6, expected_error=error, source=source,
    )  # fmt: skip
    if call.measured_s is None:
        return row
    return replace(
        row,
        measured_us=call.measured_s * 1e6,
        ape=abs(predicted_s / call.measured_s - 1),
        baseline_ape=abs(plain_s / call.measured_s - 1),
    )


# --- all together -------------------------------------------------------------------------------------------------


def summary(rows: Collection[Predicted]) -> dict[str, Any]:
    """Errors of all rows that have a measured time, by device and operator, and of those training asks for."""
    scored = [row for row in rows if row.ape is not None]
    skipped = sum(row.skipped_reason is not None for row in rows)
    return {
        **_errors(scored),
        "n_skipped": skipped,
        "by_gpu": _by(scored, "gpu"),
        "by_op": _by(scored, "op"),
        "by_family": _by(scored, "family"),
        "by_source": _by(scored, "source"),
        "training_sized": {
            **_errors([row for row in scored if row.usual]),
            "by_gpu": _by([row for row in scored if row.usual], "gpu"),
        },
    }


def _by(rows: Sequence[Predicted], column: str) -> dict[str, Any]:
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for row in rows:
        groups[getattr(row, column)].append(row)
    return {name: _errors(members) for name, members in sorted(groups.items())}


def _errors(rows: Sequence[Predicted]) -> dict[str, Any]:
    """Count and errors; null where there is no row."""
    errors = [row.ape for row in rows if row.ape is not None]
    plain = [row.baseline_ape for row in rows if row.baseline_ape is not None]
    signed = [row.predicted_us / row.measured_us - 1 for row in rows if row.predicted_us and row.measured_us]
    if not errors:
        return {"n": 0} | dict.fromkeys(("median_ape", "mean_ape", "p90_ape", "mean_bias", "baseline_mean_ape"))
    return {
        "n": len(errors),
        "median_ape": median(errors),
        "mean_ape": float(np.mean(errors)),
        "p90_ape": float(np.quantile(errors, 0.9)),
        "mean_bias": float(np.mean(signed)),
        "baseline_mean_ape": float(np.mean(plain)),
    }
