"""Predicted steps beside measured ones as a table of at most 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.validation.steps import PredictedStep
from autopar.validation.summaries import summary

HEAD = f"{'':<28}{'rows':>6}{'median':>8}{'mean':>8}{'p90':>8}{'bias':>8}{'constant':>10}"
REASONS = 4
"""Reasons for skipping that are shown at most."""


def steps_text(rows: Sequence[PredictedStep]) -> str:
    """Errors of step times by source and device, the ranking of plans, memory, and the plain predictors beside."""
    found = summary(rows)
    lines = [HEAD, _line("step time", found)]
    for title, key in (("source", "by_source"), ("device", "by_gpu")):
        lines += ["", f"by {title}"] + [_line(f"  {name}", errors) for name, errors in found[key].items()]
    lines += ["", "from published FLOP/s", *(_line(f"  {k}", e) for k, e in found["estimated"]["by_source"].items())]
    lines += ["", "plain predictors"]
    lines += [_line(f"  {name}", errors) for name, errors in found["baselines"].items()]
    lines += ["", *_ranking(found), "", *_memory(found["memory"])]
    reasons = Counter(row.skipped_reason for row in rows if row.skipped_reason)
    if reasons:
        lines += ["", f"{found['n_skipped']} rows skipped:"]
        lines += [_cut(f"  {count}: {reason}") for reason, count in reasons.most_common(REASONS)]
    return "\n".join(lines)


def _ranking(found: Mapping[str, Any]) -> list[str]:
    if not found["n_groups"]:
        return ["ranking: no group of three plans or more"]
    lines = [f"ranking of plans, {found['n_groups']} groups{'tau':>14}{'regret':>9}{'within 5 %':>12}"]
    for name, one in (("this model", found), *found["baselines"].items()):
        tau = "-" if one["kendall_tau"] is None else f"{one['kendall_tau']:.2f}"
        lines.append(f"  {name:<32}{tau:>10}{one['mean_regret']:>9.1%}{one['near_best']:>12.0%}")
    return lines


def _memory(found: Mapping[str, Any]) -> list[str]:
    lines = [_line("peak memory", found)] + [_line(f"  {name}", e) for name, e in found["by_source"].items()]
    lines += [_line(f"  {name}", e) for name, e in found["by_component"].items()]
    lines.append(
        f"  of {found['n']} that ran {found['ran_called_infeasible']} are called infeasible, of {found['n_oom']} that "
        f"ran out {found['oom_called_infeasible']}"
    )
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _line(name: str, errors: Mapping[str, Any]) -> str:
    if not errors["n"]:
        return f"{name[:28]:<28}{0:>6}"
    keys = ("median_ape", "mean_ape", "p90_ape", "mean_bias")
    shares = "".join(f"{errors[key]:>8.1%}" for key in keys)
    plain = errors.get("baseline_median_ape")
    return f"{name[:28]:<28}{errors['n']:>6}{shares}" + (f"{plain:>10.1%}" if plain is not None else "")
