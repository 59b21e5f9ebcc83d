"""What is to be said of predicted rows all together: errors, ranking of plans, memory, by source and by device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

import numpy as np

from autopar.validation.steps import PredictedStep

APART = 0.05
"""Plans are ranked against each other where their measured times differ by more."""

LEAST_PLANS = 3


def summary(rows: Sequence[PredictedStep]) -> dict[str, Any]:
    """The summary of `autopar validate`."""
    scored = [r for r in rows if r.ape is not None and r.kind == "training"]
    measured, estimated = [r for r in scored if not r.estimated], [r for r in scored if r.estimated]
    return {
        **errors(measured),
        "n_skipped": sum(r.skipped_reason is not None for r in rows),
        "baselines": baselines(measured),
        "by_source": by(measured, lambda r: r.source_id),
        "closed_by_source": {
            name: median(
                abs(r.closed_form_s / r.measured_step_time_s - 1)
                for r in scored
                if r.source_id == name and r.closed_form_s and r.measured_step_time_s
            )
            for name in sorted({r.source_id for r in scored})
        },
        "by_gpu": by(measured, lambda r: r.gpu),
        **ranking(measured),
        "estimated": {
            **errors(estimated),
            "by_source": by(estimated, lambda r: r.source_id),
        },
        "memory": memory(rows),
    }


def by(rows: Iterable[PredictedStep], key: Callable[[PredictedStep], str]) -> dict[str, Any]:
    """Errors of each group of rows."""
    groups: dict[str, list[PredictedStep]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return {name: errors(members) for name, members in sorted(groups.items())}


def errors(rows: Sequence[PredictedStep]) -> dict[str, Any]:
    """Count and errors of step times; null where there is no row."""
    pairs = [(r.predicted_step_time_s, r.measured_step_time_s) for r in rows]
    found = _errors([p / m - 1 for p, m in pairs if p is not None and m])
    plain = [abs(r.baseline_s / r.measured_step_time_s - 1) for r in rows if r.baseline_s and r.measured_step_time_s]
    return found | {"baseline_median_ape": median(plain) if plain else None}


def baselines(rows: Sequence[PredictedStep]) -> dict[str, Any]:
    """Errors and ranking of the plain predictors on the same rows."""
    columns: Mapping[str, Callable[[PredictedStep], float | None]] = {
        "constant": lambda r: r.baseline_s, "closed_form": lambda r: r.closed_form_s,
    }  # fmt: skip
    found = {}
    for name, column in columns.items():
        pairs = [(column(r), r.measured_step_time_s) for r in rows]
        found[name] = _errors([p / m - 1 for p, m in pairs if p is not None and m]) | ranking(rows, column)
    return found


def _errors(signed: Sequence[float]) -> dict[str, Any]:
    if not signed:
        return {"n": 0} | dict.fromkeys(("median_ape", "mean_ape", "p90_ape", "mean_bias", "median_bias"))
    absolute = np.abs(signed)
    return {
        "n": len(signed),
        "median_ape": float(np.median(absolute)),
        "mean_ape": float(absolute.mean()),
        "p90_ape": float(np.quantile(absolute, 0.9)),
        "mean_bias": float(np.mean(signed)),
        "median_bias": float(np.median(signed)),
    }


# --- ranking --------------------------------------------------------------------------------------------------------


def _predicted(row: PredictedStep) -> float | None:
    return row.predicted_step_time_s


def ranking(
    rows: Iterable[PredictedStep], column: Callable[[PredictedStep], float | None] = _predicted
) -> dict[str, Any]:
    """Kendall's tau of plans of the same step, and what is lost by taking the plan predicted to be the best.

    M. G. Kendall, "A new measure of rank correlation", 1938: of pairs whose measured times are more than 5 % apart,
    those in the right order less those in the wrong one, over all; equal predictions count as neither. A plan that was
    run several times counts once.
    """
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = {}
    for row in rows:
        predicted, measured = column(row), row.measured_step_time_s
        if predicted is not None and measured:
            groups.setdefault(row.group, {}).setdefault(row.plan, []).append((predicted, measured))
    plans = [[_middle(runs) for runs in group.values()] for group in groups.values() if len(group) >= LEAST_PLANS]
    taus = [tau for members in plans if (tau := _tau(members)) is not None]
    regrets = [_regret(members) for members in plans]
    return {
        "kendall_tau": fmean(taus) if taus else None,
        "mean_regret": fmean(regrets) if regrets else None,
        "near_best": fmean(regret <= APART for regret in regrets) if regrets else None,
        "n_groups": len(plans),
    }


def _middle(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A plan's predicted and measured time: the medians of its runs."""
    return median(p for p, _ in runs), median(m for _, m in runs)


def _regret(plans: Sequence[tuple[float, float]]) -> float:
    """Time lost by the plan predicted to be the best; the mean of those predicted alike."""
    best = min(predicted for predicted, _ in plans) * (1 + 1e-9)
    return fmean(m for predicted, m in plans if predicted <= best) / min(m for _, m in plans) - 1


def _tau(plans: Sequence[tuple[float, float]]) -> float | None:
    signs = [
        float(np.sign((p - q) * (m - n)))
        for (p, m), (q, n) in combinations(plans, 2)
        if max(m, n) > min(m, n) * (1 + APART)
    ]
    return fmean(signs) if signs else None


# --- memory ---------------------------------------------------------------------------------------------------------


def memory(rows: Iterable[PredictedStep]) -> dict[str, Any]:
    """Errors of bytes: of totals, and by source and component; and whether what ran and what ran out is told apart."""
    weighed = [r for r in rows if r.skipped_reason is None and (r.kind == "memory" or r.measured_peak_memory_bytes)]
    totals = [r for r in weighed if r.is_total]
    ran = [r for r in totals if not r.oom and r.measured_peak_memory_bytes]
    out = [r for r in totals if r.oom]
    return {
        **_errors([_bias(r) for r in ran]),
        "by_source": _grouped(ran, lambda r: r.source_id),
        "by_component": _grouped([r for r in weighed if not r.is_total], lambda r: r.component),
        "ran_called_infeasible": sum(r.feasible is False for r in ran),
        "n_oom": len(out),
        "oom_called_infeasible": sum(r.feasible is False for r in out),
    }


def _grouped(rows: Iterable[PredictedStep], key: Callable[[PredictedStep], str]) -> dict[str, Any]:
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.measured_peak_memory_bytes:
            groups[key(row)].append(_bias(row))
    return {name: _errors(members) for name, members in sorted(groups.items())}


def _bias(row: PredictedStep) -> float:
    held = row.predicted_component_bytes or row.predicted_peak_memory_bytes or 0.0
    return held / row.measured_peak_memory_bytes - 1 if row.measured_peak_memory_bytes else 0.0
