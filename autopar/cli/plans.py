"""Commands that read plans: explain, diff, check, export."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from autopar.cli.answer import Answer, check_targets, cluster_of, say, speaks, work
from autopar.cli.options import ClusterName, Json, OutFile, PlanFile


def explain(plan: PlanFile, as_json: Json = False) -> Answer:
    """Say in words what a plan does, and what it is predicted to cost."""
    from autopar.plan import PlanRecord
    from autopar.report.explain import explain as words

    record = PlanRecord.load(plan)
    return Answer(words(record), record.to_json(), as_json)


def diff(plan: PlanFile, other: PlanFile, as_json: Json = False) -> Answer:
    """Say in words how two plans differ, and which seconds make one faster."""
    from autopar.plan import PlanRecord
    from autopar.report.compare import diff as words
    from autopar.report.compare import diff_data

    first, second = PlanRecord.load(plan), PlanRecord.load(other)
    return Answer(words(first, second), diff_data(first, second), as_json)


def check(plan: PlanFile, cluster: ClusterName, as_json: Json = False) -> Answer:
    """Predict a plan anew for a cluster, from the plan alone."""
    from autopar.plan import PlanRecord

    record, where = PlanRecord.load(plan), cluster_of(cluster, None)
    with work():
        from autopar.api import Plan

        found = Plan(record).check(where)
    return Answer(found.explain(), found.to_json(), as_json)


def export(
    plan: PlanFile,
    to: Annotated[Literal["torchtitan", "megatron", "deepspeed"], typer.Option("--to", help="For which framework.")],
    output: OutFile = None,
) -> Answer:
    """Write a plan as another framework's settings, or say what of it that framework can't run."""
    from importlib import import_module

    from autopar.export.recipe import read
    from autopar.files import write_atomically
    from autopar.plan import PlanRecord

    check_targets(output)
    text, notes = import_module(f"autopar.export.{to}").settings(read(PlanRecord.load(plan)))
    if speaks():
        for note in notes:
            say(f"note: {note}.")
        if output:
            write_atomically(output, text)
    return Answer(f"written to {output}" if output else text.rstrip("\n"), text)
