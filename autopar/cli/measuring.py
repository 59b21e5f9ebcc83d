"""Commands that measure, and compare with measurements: profile, profile-collectives, validate, validate-ops."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autopar.cli.answer import Answer, check_targets, cluster_of, load, require_plotly, say, speaks, work
from autopar.cli.options import ClusterName, DtypeName, GlobalBatch, Json, Model, OutFile, ReportFile, Rows, SeqLen

if TYPE_CHECKING:
    from autopar.measure.profile import Profile


def profile(
    model: Model,
    cluster: ClusterName,
    global_batch: GlobalBatch,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option("--device", help="Where to measure.")] = None,
    seq_len: SeqLen = None,
    dtype: DtypeName = "bf16",
    output: OutFile = None,
) -> Answer:
    """Measure the operators that planning this would ask for."""
    check_targets(output)
    where = cluster_of(cluster, None)
    with work():
        from autopar import profiling

        found = profiling.profile(
            **load(model, seq_len),
            cluster=where,
            global_batch=global_batch,
            dtype=dtype,
            device=device,
            add_to=output if output and output.exists() else None,
            say=say,
        )
    return _taken(found, output)


def profile_collectives(output: OutFile = None) -> Answer:
    """Measure collectives over the processes of this job (start it with torchrun)."""
    check_targets(output)
    with work():
        from autopar import profiling

        found = profiling.profile_collectives(add_to=output if output and output.exists() else None, say=say)
    return _taken(found, output)


def _taken(found: Profile, output: Path | None) -> Answer:
    """Write a profile where it was asked for, and say what it holds."""
    failed = sum(1 for timing in found.timings.values() if timing.failed)
    if output and speaks():
        found.save(output)
    kept = f"written to {output}" if output else "kept for planning with --cluster local"
    environment = found.environment
    busy = f", {environment.busy_ranks} processes at once" if environment.busy_ranks > 1 else ""
    busy += f" on {environment.nodes} nodes" if environment.nodes > 1 else ""
    text = f"{len(found.timings)} timings on {environment.device}{busy} ({failed} failed), {kept}"
    if not found.timings:
        text = "nothing to time: one process has no groups to communicate in; start it with torchrun"
    return Answer(text, {"timings": len(found.timings), "failed": failed, "output": str(output) if output else None})


def validate(rows: Rows, report: ReportFile = None, as_json: Json = False) -> Answer:
    """Compare predictions with measured training and memory rows."""
    check_targets(report)
    require_plotly(report)
    from autopar.rows import STEP_KINDS, read_tables, repeated_ids
    from autopar.validation.step_text import steps_text
    from autopar.validation.steps import predict_steps
    from autopar.validation.summaries import summary

    tables = read_tables(rows, STEP_KINDS)
    for said in repeated_ids(tables):
        say(f"warning: {said}: results can't be told apart by it.")
    found = predict_steps(tables)
    if report:
        from autopar.validation.step_page import write_step_page

        write_step_page(found, report)
    data = {"rows": [row.to_json() for row in found], "summary": summary(found)} if as_json else None
    return Answer("" if as_json else steps_text(found), data, as_json)


def validate_ops(
    rows: Rows,
    fit: Annotated[list[Path] | None, typer.Option("--fit", help="Rows to take as a device's profile.")] = None,
    exclude_device: Annotated[
        list[str] | None, typer.Option("--exclude-device", help="Predict it without its own constants.")
    ] = None,
    report: ReportFile = None,
    as_json: Json = False,
) -> Answer:
    """Compare predictions with measured operators and collectives, beside a constant share of peak."""
    check_targets(report)
    require_plotly(report)
    from autopar.rows import OP_KINDS, read_tables
    from autopar.validation.predict import predict, summary
    from autopar.validation.text import table_text

    found = predict(read_tables(rows, OP_KINDS), read_tables(fit or [], OP_KINDS), exclude_device or [])
    if report:
        from autopar.validation.page import write_page

        write_page(found, report)
    data = {"rows": [row.to_json() for row in found], "summary": summary(found)} if as_json else None
    return Answer("" if as_json else table_text(found), data, as_json)
