"""The command line. Commands return an `Answer`; `main` prints it, or the error, in the form that was asked for."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, get_args

import typer

from autopar import __version__
from autopar import cluster as hardware
from autopar.errors import AutoparError, ConfigError

WIDTH = 80
CLICK_ERROR = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the argument parser raises; found this way since typer carries its own click from some version on."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
devices_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(devices_app, name="devices")


@dataclass(frozen=True)
class Answer:
    """What a command found out: as text for people, as plain data for `--json`."""

    text: str
    data: Any
    as_json: bool = False


class Unavailable(AutoparError):
    """This version can't do that yet."""

    exit_code = 1


# --- options several commands share ---------------------------------------------------------------------------------

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
DtypeName: TypeAlias = Annotated[
    str, typer.Option("--dtype", help="bf16, fp16, fp32, fp64; fp8 and less predict only.")
]
OptimizerName: TypeAlias = Annotated[str, typer.Option("--optimizer", help="adamw, adam, sgd, adafactor, adamw8bit.")]
MemoryLimit: TypeAlias = Annotated[
    str | None, typer.Option("--memory-limit", help="Most tensor bytes a device may hold, such as 70GiB.")
]
ConfigText: TypeAlias = Annotated[
    str | None, typer.Option("--config", help="A hand-written plan such as dp=8,tp=8,microbatch_size=1,zero=1.")
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
Objective: TypeAlias = Literal["step_time", "tokens_per_s_per_device", "cost_per_token", "energy_per_token", "memory"]
OBJECTIVES = get_args(Objective)


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Find how to split a PyTorch model over many devices, and predict how that runs."""
    del debug, version  # main takes them wherever they stand


# --- planning -------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    model: Model,
    cluster: ClusterName,
    global_batch: GlobalBatch,
    seq_len: SeqLen = None,
    dtype: DtypeName = "bf16",
    optimizer: OptimizerName = "adamw",
    memory_limit: MemoryLimit = None,
    config: ConfigText = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option("--constraint", metavar="<str>", help="[PATTERN:](KEY=VALUE | replicate); repeat for more."),
    ] = None,
    objective: Annotated[
        Objective, typer.Option("--objective", metavar="OBJECTIVE", help=f"What to make best: {', '.join(OBJECTIVES)}.")
    ] = "step_time",
    profile: ProfileFile = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many plans to show.")] = 1,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Admit plans that change what is computed.")
    ] = False,
    what_if: Annotated[
        str | None, typer.Option("--what-if", help="Scale the cluster: network=0.8,memory=0.9,compute=1.2.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search.")] = 0,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, help="Seconds to search at most.")
    ] = None,
    output: OutFile = None,
    report: ReportFile = None,
    timeline: TimelineFile = None,
    as_json: Json = False,
) -> Answer:
    """Find the best plan for a model on a cluster."""
    _check_targets(output, report, timeline)
    where, pinned = _cluster(cluster, what_if), _config(config) if config else None
    with _work():
        from autopar import api

        found = api.plan(
            **_load(model, seq_len),
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
        _write(found, output, report, timeline)
        return Answer(found.explain(), found.to_json(), as_json)


@app.command()
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
    timeline: TimelineFile = None,
    as_json: Json = False,
) -> Answer:
    """Predict step time and memory of a hand-written plan."""
    if straggler is not None:
        _unavailable("estimate --straggler", "leave it out")
    _check_targets(timeline)
    where, wanted = _cluster(cluster, None), _config(config)
    with _work():
        from autopar import api

        found = api.estimate(
            **_load(model, seq_len),
            cluster=where,
            global_batch=global_batch,
            config=wanted,
            optimizer=optimizer,
            dtype=dtype,
            memory_limit=memory_limit,
            profile=profile,
        )
        _write(found, None, None, timeline)
        return Answer(found.explain(), found.to_json(), as_json)


@app.command()
def scale(
    model: Model,
    devices: Annotated[str, typer.Option("--devices", help="First and last size, such as 8..4096.")],
    device: Annotated[str, typer.Option("--device", help="A name from `autopar devices`.")],
    global_batch: GlobalBatch,
    as_json: Json = False,
) -> Answer:
    """Show the best plan by size of the cluster."""
    del model, devices, device, global_batch, as_json
    _unavailable("scale", "run `autopar plan` for each size")


@app.command()
def search(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB.toml...", help="Job files.")],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes to search with.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the points that are done.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the work over a Ray cluster.")] = False,
) -> Answer:
    """Check job files and the points they ask for."""
    from autopar.jobs import read_jobs

    points = sum(len(job.points) for job in read_jobs(jobs))
    del workers, resume, ray
    _unavailable(
        f"search (the {len(jobs)} files are in order and ask for {points} plans)", "run `autopar plan` for each"
    )


# --- plans ----------------------------------------------------------------------------------------------------------


@app.command()
def explain(plan: PlanFile) -> Answer:
    """Say in words what a plan does, and what it is predicted to cost."""
    from autopar.plan import PlanRecord
    from autopar.report.explain import explain as words

    record = PlanRecord.load(plan)
    return Answer(words(record), record.to_json())


@app.command()
def diff(plan: PlanFile, other: PlanFile) -> Answer:
    """Say in words how two plans differ."""
    from autopar.plan import PlanRecord

    PlanRecord.load(plan), PlanRecord.load(other)
    _unavailable("diff", "compare what `autopar explain` says of each")


@app.command()
def check(plan: PlanFile, cluster: ClusterName) -> Answer:
    """Predict a plan anew for a cluster."""
    from autopar.plan import PlanRecord

    PlanRecord.load(plan), _cluster(cluster, None)
    _unavailable("check", "run `autopar estimate` with the plan's configuration")


@app.command()
def export(
    plan: PlanFile,
    to: Annotated[Literal["torchtitan", "megatron", "deepspeed"], typer.Option("--to", help="For which framework.")],
) -> Answer:
    """Write a plan as another framework's settings."""
    from autopar.plan import PlanRecord

    PlanRecord.load(plan)
    _unavailable(f"export to {to}", "read the degrees from `autopar explain`")


# --- measuring and checking -----------------------------------------------------------------------------------------


@app.command()
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
    _check_targets(output)
    where = _cluster(cluster, None)
    with _work():
        from autopar import api

        text = api.profile(
            **_load(model, seq_len),
            cluster=where,
            global_batch=global_batch,
            dtype=dtype,
            device=device,
            output=output,
        )
        return Answer(text, {"output": str(output) if output else None})


@app.command("profile-collectives")
def profile_collectives(output: OutFile = None) -> Answer:
    """Measure collectives over the processes of this job (start it with torchrun)."""
    del output
    _unavailable("profile-collectives", "plan with the cluster's datasheet links")


@app.command()
def validate(rows: Rows, report: ReportFile = None, as_json: Json = False) -> Answer:
    """Compare predictions with measured training and memory rows."""
    from autopar.rows import STEP_KINDS, read_tables

    count = sum(len(table.rows) for table in read_tables(rows, STEP_KINDS))
    del report, as_json
    _unavailable(f"validate (its {count} rows are readable)", "run `autopar estimate` for the runs you know")


@app.command("validate-ops")
def validate_ops(
    rows: Rows,
    fit: Annotated[list[Path] | None, typer.Option("--fit", help="Rows to take as a device's profile.")] = None,
    exclude_device: Annotated[list[str] | None, typer.Option("--exclude-device", help="Leave its rows out.")] = None,
    report: ReportFile = None,
    as_json: Json = False,
) -> Answer:
    """Compare predictions with measured operators and collectives."""
    from autopar.rows import OP_KINDS, read_tables

    count = sum(len(table.rows) for table in read_tables([*rows, *(fit or [])], OP_KINDS))
    del exclude_device, report, as_json
    _unavailable(f"validate-ops (its {count} rows are readable)", "compare with `autopar profile`")


# --- what there is --------------------------------------------------------------------------------------------------


@devices_app.callback()
def devices(context: typer.Context, as_json: Json = False) -> Answer | None:
    """List the known devices, or add one."""
    if context.invoked_subcommand:
        return None
    known = hardware.all_devices()
    lines = [f"{'device':<20}{'memory':>10}{'bandwidth':>12}{'bf16':>10}{'fp16':>10}{'fp32':>10}"]
    lines += [f"{'':<20}{'GiB':>10}{'GB/s':>12}" + f"{'TFLOP/s':>10}" * 3]
    for d in known:
        rates = (f"{d.peak_tflops.get(key, '-'):>10}" for key in ("bfloat16", "float16", "float32"))
        lines.append(f"{d.name:<20}{d.memory_gib:>10g}{d.memory_gb_per_s:>12g}{''.join(rates)}")
    return Answer("\n".join(lines), [d.model_dump() for d in known], as_json)


@devices_app.command("add")
def devices_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the device.")],
    tflops: Annotated[float, typer.Option("--tflops", help="Dense bf16 and fp16 TFLOP/s by datasheet.")],
    bandwidth_gbs: Annotated[float, typer.Option("--bandwidth-gbs", help="Memory bandwidth in GB/s.")],
    memory_gib: Annotated[float, typer.Option("--memory-gib", help="Memory in GiB.")],
    fp32_tflops: Annotated[
        float | None, typer.Option("--fp32-tflops", help="Dense fp32 TFLOP/s (default a sixteenth of --tflops).")
    ] = None,
    link_gbs: Annotated[float, typer.Option("--link-gbs", help="GB/s one way between devices of a node.")] = 32.0,
    network_gbs: Annotated[float, typer.Option("--network-gbs", help="GB/s one way a device between nodes.")] = 12.5,
) -> Answer:
    """Add a device by its datasheet figures; an earlier one of the name is replaced."""
    device = hardware.device_from_figures(
        name,
        tflops=tflops,
        fp32_tflops=tflops / 16 if fp32_tflops is None else fp32_tflops,
        bandwidth_gbs=bandwidth_gbs,
        memory_gib=memory_gib,
        link_gbs=link_gbs,
        network_gbs=network_gbs,
    )
    path = hardware.add_device(device)
    return Answer(f"{name} is in {path}; use it as 8x{name}.", {"name": name, "file": str(path)})


@app.command()
def clusters(as_json: Json = False) -> Answer:
    """List the shipped clusters."""
    lines = [f"{'cluster':<18}{'nodes':>7}{'a node':>8}  {'device':<20}{'GB/s in/out of node':>20}"]
    for file in hardware.shipped_clusters():
        c = file.cluster()
        rates = f"{c.intra.bytes_per_s / 1e9:.4g} / {c.inter.bytes_per_s / 1e9:.4g}"
        lines.append(f"{c.name:<18}{c.nodes:>7}{c.devices_per_node:>8}  {c.device.name:<20}{rates:>20}")
    lines += ["", "Any other: [NODESx]DEVICESxDEVICE, such as 16x8xh100-80gb, or a TOML file."]
    return Answer("\n".join(lines), [c.model_dump() for c in hardware.shipped_clusters()], as_json)


@app.command()
def models(as_json: Json = False) -> Answer:
    """List the shipped models."""
    from autopar.trace.shipped import SHIPPED

    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    lines = [f"{'model':<14}{'family':<8}" + "".join(f"{key:>8}" for key in keys)]
    for name, spec in SHIPPED.items():
        family, _, rest = spec.partition(":")
        dims = dict(item.split("=") for item in rest.split(","))
        lines.append(f"{name:<14}{family:<8}" + "".join(f"{dims.get(key, '-'):>8}" for key in keys))
    lines += [
        "",
        "Others: hf:DIR_OR_CONFIG.json, FILE.py:function, or dims such as",
        "gpt:layers=12,hidden=768,heads=12,vocab=50257",
    ]
    return Answer("\n".join(lines), dict(SHIPPED), as_json)


# --- how commands run -----------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with the contract's code; `--debug` and `--version` may stand anywhere."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run([a for a in given if a != "--debug"], "--debug" in given))


def _run(arguments: list[str], debug: bool) -> int:
    if arguments == ["--version"]:
        print(f"autopar {__version__}")
        return 0
    try:
        return _print(app(arguments, prog_name="autopar", standalone_mode=False))
    except KeyboardInterrupt:
        return _fail("KeyboardInterrupt", "interrupted", 130, "--json" in arguments)
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        return _fail(type(error).__name__, _message(error), code, "--json" in arguments)


def _print(answer: object) -> int:
    """Print a command's answer; the exit code. The parser answers with a code itself, after `--help`."""
    if not isinstance(answer, Answer):
        return answer if isinstance(answer, int) else 0
    if _speaks():
        _print_out(json.dumps(answer.data) if answer.as_json else answer.text)
    return 0


def _print_out(text: str) -> None:
    """Print to a reader that may have gone, as `head` does when it has enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _speaks() -> bool:
    """Whether this process is the one of a torchrun job that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def _message(error: Exception) -> str:
    if isinstance(error, CLICK_ERROR):
        return error.format_message()  # type: ignore[attr-defined, no-any-return]
    if isinstance(error, AutoparError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"


def _fail(kind: str, message: str, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
    else:
        for line in message.splitlines():
            wrapped = textwrap.fill(
                f"error: {line}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            print(wrapped, file=sys.stderr)
    return code


@contextmanager
def _work() -> Iterator[None]:
    """Whatever libraries print while working goes to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def _unavailable(what: str, instead: str) -> NoReturn:
    raise Unavailable(f"autopar {__version__} has no {what} yet; {instead}.")


def _load(spec: str, seq_len: int | None) -> dict[str, Any]:
    """The model and its inputs, as planning wants them."""
    from autopar.trace.spec import load_model

    loaded = load_model(spec, seq_len=seq_len)
    return {"model": loaded.model, "example_inputs": loaded.inputs, "name": loaded.name}


def _cluster(name: str, changes: str | None) -> Any:
    if name == "local":
        if changes:
            raise ConfigError(f"--what-if {changes!r}: not for the local machine; name a cluster")
        return name
    cluster = hardware.load_cluster(name)
    return hardware.what_if(cluster, changes) if changes else cluster


def _config(text: str) -> Any:
    from autopar.formulate.config import ManualConfig

    return ManualConfig.parse(text)


def _check_targets(*paths: Path | None) -> None:
    """Refuse files that can't be written before the work begins."""
    bad = [path for path in paths if path and (path.is_dir() or not path.absolute().parent.is_dir())]
    if bad:
        raise ConfigError(*(f"{path}: can't be written; give a file in a folder that exists" for path in bad))


def _write(found: Any, output: Path | None, report: Path | None, timeline: Path | None) -> None:
    if not _speaks():
        return
    if output:
        found.save(output)
    if report:
        found.report(report)
    if timeline:
        found.timeline(timeline)
