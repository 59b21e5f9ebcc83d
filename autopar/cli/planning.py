"""Commands that plan: plan, estimate, scale, search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.answer import (
    Answer,
    check_targets,
    cluster_of,
    config_of,
    load,
    outlined,
    require_plotly,
    say,
    work,
    write,
)
from autopar.cli.options import (
    ClusterName,
    ConfigText,
    Constraints,
    DtypeName,
    GlobalBatch,
    Json,
    MemoryLimit,
    Model,
    ObjectiveName,
    OptimizerName,
    OutFile,
    ProfileFile,
    ReportFile,
    SeqLen,
    TimeLimit,
    TimelineFile,
)


def plan(
    model: Model,
    cluster: ClusterName,
    global_batch: GlobalBatch,
    seq_len: SeqLen = None,
    dtype: DtypeName = "bf16",
    optimizer: OptimizerName = "adamw",
    memory_limit: MemoryLimit = None,
    config: ConfigText = None,
    constraint: Constraints = None,
    objective: ObjectiveName = "step_time",
    profile: ProfileFile = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many plans to show.")] = 1,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Admit plans that change what is computed.")
    ] = False,
    what_if: Annotated[
        str | None, typer.Option("--what-if", help="Scale the cluster: network=0.8,memory=0.9,compute=1.2.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search.")] = 0,
    time_limit: TimeLimit = None,
    output: OutFile = None,
    report: ReportFile = None,
    timeline: TimelineFile = None,
    as_json: Json = False,
) -> Answer:
    """Find the best plan for a model on a cluster."""
    check_targets(output, timeline, report)
    require_plotly(report)
    where, pinned = cluster_of(cluster, what_if), config_of(config) if config else None
    with work():
        from autopar import api

        found = api.plan(
            **load(model, seq_len),
            cluster=where,
            global_batch=global_batch,
            optimizer=optimizer,
            dtype=dtype,
            memory_limit=memory_limit,
            objective=objective,
            constraints=constraint or [],
            config=pinned,
            profile=profile,
            top=top,
            allow_inexact=allow_inexact,
            seed=seed,
            time_limit_s=time_limit,
        )
        if what_if:
            found = found.changed_from(cluster, what_if, profile)
        write(found, output, timeline, report)
        return Answer(found.explain(), found.to_json(), as_json)


def estimate(
    model: Model,
    cluster: ClusterName,
    global_batch: GlobalBatch,
    config: Annotated[str, typer.Option("--config", help="The plan to predict, such as dp=8,tp=8,zero=1.")],
    seq_len: SeqLen = None,
    dtype: DtypeName = "bf16",
    optimizer: OptimizerName = "adamw",
    memory_limit: MemoryLimit = None,
    profile: ProfileFile = None,
    straggler: Annotated[
        float | None, typer.Option("--straggler", min=1.0, help="How much slower the slowest device is.")
    ] = None,
    output: OutFile = None,
    timeline: TimelineFile = None,
    as_json: Json = False,
) -> Answer:
    """Predict step time and memory of a hand-written plan."""
    check_targets(output, timeline)
    where, wanted = cluster_of(cluster, None), config_of(config)
    with work():
        from autopar import api

        found = api.estimate(
            **(outlined(model, seq_len) if wanted.framework != "autopar" else load(model, seq_len)),
            cluster=where,
            global_batch=global_batch,
            config=wanted,
            optimizer=optimizer,
            dtype=dtype,
            memory_limit=memory_limit,
            profile=profile,
            straggler=straggler or 1.0,
        )
        write(found, output, timeline)
        return Answer(found.explain(), found.to_json(), as_json)


def scale(
    model: Model,
    devices: Annotated[str, typer.Option("--devices", help="First and last size, such as 8..4096.")],
    device: Annotated[str, typer.Option("--device", help="A name from `autopar devices`.")],
    global_batch: GlobalBatch,
    seq_len: SeqLen = None,
    dtype: DtypeName = "bf16",
    optimizer: OptimizerName = "adamw",
    memory_limit: MemoryLimit = None,
    constraint: Constraints = None,
    objective: ObjectiveName = "step_time",
    profile: ProfileFile = None,
    time_limit: TimeLimit = None,
    as_json: Json = False,
) -> Answer:
    """Show the best plan by size of the cluster, doubled from the first to the last."""
    from autopar.asked import Asked
    from autopar.report.scale import scale_text
    from autopar.scaling import cluster_name, scale, sizes

    counts = sizes(devices)
    cluster_of(cluster_name(counts[0], device), None)
    with work():
        loaded = load(model, seq_len)
        inputs = loaded.pop("example_inputs")
        asked = Asked(
            **loaded, cluster="", global_batch=global_batch, dtype=dtype, optimizer=optimizer,
            memory_limit=memory_limit, constraints=tuple(constraint or ()), objective=objective,
            time_limit_s=time_limit,
        )  # fmt: skip
        found = list(scale(asked, inputs, counts, device, profile=profile, say=say))
    return Answer(scale_text(found), {"sizes": [size.to_json() for size in found]}, as_json)


def search(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB.toml...", help="Job files.")],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes to search with.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the points that are done.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the work over a Ray cluster.")] = False,
) -> Answer:
    """Find the plans that job files ask for; results lie in a folder beside each file."""
    from autopar.jobs.points import read_jobs
    from autopar.jobs.run import run_jobs
    from autopar.jobs.summary import outcome_words
    from autopar.jobs.work import FAILED

    found = run_jobs(read_jobs(jobs), workers=workers, resume=resume, ray=ray, say=say)
    lines = [f"{o.point.name}: {outcome_words(o.document)}" for o in found]
    lines += [f"summary: {folder / 'summary.md'}" for folder in dict.fromkeys(o.job.folder for o in found)]
    return Answer("\n".join(lines), None, exit_code=int(any(o.status == FAILED for o in found)))
