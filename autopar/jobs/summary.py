"""What came of a job's points, as a table for people (Markdown) and for programs (CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.jobs.points import Point
from autopar.jobs.work import PLAN, status_of
from autopar.plan import PlanRecord
from autopar.report.strategy import most_common
from autopar.report.units import gib_text, seconds_text, share_text

Rows = Sequence[tuple[Point, Mapping[str, Any]]]

ASKED = ("model", "cluster", "global_batch", "seq_len", "dtype", "optimizer", "memory_limit", "objective")
FIGURES = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu", "peak_memory_bytes",
    "lower_bound_s", "gap", "num_microbatches", "microbatch_size", "pp_degree", "schedule", "energy_j", "trace_s",
    "search_s",
)  # fmt: skip
"""Figures of a plan that the CSV has a column for."""


def csv_text(rows: Rows) -> str:
    """A line a point: what was asked, its status, the figures of its plan, what the plan is, why there is none."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["point", *ASKED, "status", *FIGURES, "plan", "message"])
    for point, document in rows:
        asked = [point.model, document.get("request", {}).get("cluster", point.cluster)]
        asked += ["" if getattr(point, key) is None else getattr(point, key) for key in ASKED[2:]]
        figures = ["" if document.get(key) is None else document[key] for key in FIGURES]
        message = document.get("error", {}).get("message", "").replace("\n", "; ")
        table.writerow([point.name, *asked, status_of(dict(document)), *figures, plan_words(document), message])
    return out.getvalue()


def markdown(title: str, rows: Rows) -> str:
    """A table of the plans, and below it what failed or can't be."""
    lines = [
        f"# {title}",
        "",
        "| model | cluster | batch | step | tokens/s a device | MFU | peak | gap | plan |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    without = [f"- `{p.name}`: {outcome_words(d)}" for p, d in rows if status_of(dict(d)) != PLAN]
    lines += [_line(point, document) for point, document in rows if status_of(dict(document)) == PLAN]
    return "\n".join([*lines, *(["", "Without a plan:", "", *without] if without else []), ""])


def _line(point: Point, d: Mapping[str, Any]) -> str:
    length = f" x {point.seq_len}" if point.seq_len else ""
    tokens = "" if d["tokens_per_s_per_device"] is None else f"{d['tokens_per_s_per_device']:,.0f}"
    cells = (
        f"[{point.model}]({point.name}.json)",
        d["request"]["cluster"],
        f"{point.global_batch}{length}",
        seconds_text(d["step_time_s"]),
        tokens,
        "" if d["mfu"] is None else share_text(d["mfu"]),
        gib_text(d["peak_memory_bytes"]),
        share_text(d["gap"]),
        plan_words(d),
    )
    return f"| {' | '.join(cells)} |"


def plan_words(document: Mapping[str, Any]) -> str:
    """Stages, microbatches and what most layers do; nothing where there is no plan."""
    if "error" in document or not document:
        return ""
    record = PlanRecord.from_json(document)
    stages = f"{len(record.stages)} stages ({record.schedule}), " if record.pp_degree > 1 else ""
    count = record.num_microbatches
    return f"{stages}{count} microbatch{'es' * (count > 1)}, {most_common(record)}"


def outcome_words(document: Mapping[str, Any]) -> str:
    """One line: the step time, or why there is none."""
    if "error" in document:
        kind = status_of(dict(document))
        return f"{kind}: {document['error']['message']}".replace("\n", "; ")
    return f"{seconds_text(document['step_time_s'])} a step, {gib_text(document['peak_memory_bytes'])} at the peak"
