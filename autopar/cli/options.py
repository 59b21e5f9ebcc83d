"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from autopar.choices import DTYPES, OBJECTIVES, OPTIMIZERS, Objective, listed

Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="hf:DIR_OR_CONFIG.json, FILE.py:function, a name from `autopar models`, or dims such as "
        "gpt:layers=12,hidden=768,heads=12,vocab=50257.",
    ),
]
ClusterName: TypeAlias = Annotated[
    str,
    typer.Option("--cluster", help="[NODESx]DEVICESxDEVICE such as 16x8xh100-80gb, a TOML file, a name, or local."),
]
GlobalBatch: TypeAlias = Annotated[int, typer.Option("--global-batch", min=1, help="Sequences (samples) a step.")]
SeqLen: TypeAlias = Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens a sequence.")]
DtypeName: TypeAlias = Annotated[str, typer.Option("--dtype", help=f"{listed(DTYPES)}.")]
OptimizerName: TypeAlias = Annotated[
    str, typer.Option("--optimizer", metavar="OPTIMIZER", help=f"{listed(OPTIMIZERS)}.")
]
MemoryLimit: TypeAlias = Annotated[
    str | None, typer.Option("--memory-limit", help="Most tensor bytes a device may hold, such as 70GiB.")
]
ConfigText: TypeAlias = Annotated[
    str | None, typer.Option("--config", help="A hand-written plan such as dp=8,tp=8,microbatch_size=1,zero=1.")
]
Constraints: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--constraint", metavar="<str>", help="[PATTERN:](KEY=VALUE | replicate); repeat for more."),
]
ProfileFile: TypeAlias = Annotated[
    Path | None, typer.Option("--profile", help="Measured times, a file written by `autopar profile -o`.")
]
TimelineFile: TypeAlias = Annotated[
    Path | None, typer.Option("--timeline", help="Write the simulated step for Perfetto to this file.")
]
ReportFile: TypeAlias = Annotated[Path | None, typer.Option("--report", help="Write a page to look at to this file.")]
OutFile: TypeAlias = Annotated[Path | None, typer.Option("-o", "--output", help="Write the result to this file.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
PlanFile: TypeAlias = Annotated[Path, typer.Argument(metavar="PLAN", help="A file written by `autopar plan -o`.")]
Rows: TypeAlias = Annotated[list[Path], typer.Argument(metavar="ROWS.csv...", help="Tables, .csv or .csv.gz.")]
ObjectiveName: TypeAlias = Annotated[
    Objective, typer.Option("--objective", metavar="OBJECTIVE", help=f"What to make best: {listed(OBJECTIVES)}.")
]
TimeLimit: TypeAlias = Annotated[
    float | None, typer.Option("--time-limit", min=0.0, help="Seconds to search at most (each size).")
]
