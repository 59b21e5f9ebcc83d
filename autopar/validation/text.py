"""Predictions beside measurements as a table of at most 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.validation.predict import Predicted, summary

HEAD = f"{'':<28}{'rows':>8}{'mean':>8}{'median':>8}{'p90':>8}{'bias':>8}{'constant':>10}"
REASONS = 3
"""Reasons for skipping that are shown at most."""


def table_text(rows: Sequence[Predicted]) -> str:
    """Errors by family, device and operator, with the constant share's mean error in the last column."""
    found = summary(rows)
    lines = [HEAD, _line("all rows", found), _line("training-sized", found["training_sized"])]
    for title, key in (("family", "by_family"), ("device", "by_gpu"), ("operator", "by_op"), ("source", "by_source")):
        lines += ["", f"by {title}"] + [_line(f"  {name}", errors) for name, errors in found[key].items()]
    lines += ["", "by device, training-sized"]
    lines += [_line(f"  {name}", errors) for name, errors in found["training_sized"]["by_gpu"].items()]
    reasons = Counter(row.skipped_reason for row in rows if row.skipped_reason)
    if reasons:
        lines += ["", f"{found['n_skipped']} rows skipped:"]
        lines += [_cut(f"  {count}: {reason}") for reason, count in reasons.most_common(REASONS)]
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _line(name: str, errors: Mapping[str, Any]) -> str:
    if not errors["n"]:
        return f"{name:<28}{0:>8}"
    keys = ("mean_ape", "median_ape", "p90_ape", "mean_bias")
    shares = "".join(f"{errors[key]:>8.1%}" for key in keys)
    return f"{name[:28]:<28}{errors['n']:>8}{shares}{errors['baseline_mean_ape']:>10.1%}"
