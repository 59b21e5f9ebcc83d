"""Predictions for rows of training and memory tables: seconds of a step, bytes at its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.rows import Table
from autopar.transformer.constants import Constants, shipped_constants
from autopar.transformer.memory import KEPT_LOGITS, Bytes, fits, peak_bytes, stage_bytes
from autopar.transformer.step import Costs, costs_of, step_time
from autopar.validation.plain import Closed, closed_form_s, constant_share_s, shipped_closed
from autopar.validation.runs import Run, decimal, read_run
from autopar.validation.words import plain

GB, GIB = 1e9, 2**30

GROUP = ("source_id", "model_name", "framework", "layers", "hidden", "heads", "seq_len", "gpu", "gpus",
         "global_batch_seqs", "dtype")  # fmt: skip
"""Columns that plans of one group share: they differ in how the same step is spread over the same devices."""

PLAN = ("dp", "tp", "pp", "cp", "ep", "virtual_stages", "schedule", "zero_stage", "sequence_parallel", "recompute",
        "micro_batch", "flash_attention")  # fmt: skip
"""Columns that make a plan; rows that agree in all of them are one plan run again."""

TOTALS = ("", "total", "total peak", "peak")
"""Components that are all there is."""


@dataclass(frozen=True)
class PredictedStep:
    """One row of the answer; what can't be predicted has a `skipped_reason` and no figures.

    `estimated`: the measured time was inverted from FLOP/s by the source's formula. `baseline_s` is what a constant
    share of peak says, `closed_form_s` what the closed form with seven constants does.
    """

    row_id: str
    kind: str
    source_id: str = ""
    gpu: str = ""
    group: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    estimated: bool = False
    ape: float | None = None
    baseline_s: float | None = None
    closed_form_s: float | None = None
    component: str = ""
    predicted_peak_memory_bytes: float | None = None
    predicted_component_bytes: float | None = None
    measured_peak_memory_bytes: float | None = None
    memory_ape: float | None = None
    feasible: bool | None = None
    oom: bool = False
    experts: bool = False
    assumed: tuple[str, ...] = ()
    skipped_reason: str | None = None

    @property
    def is_total(self) -> bool:
        """Whether its bytes are those of everything."""
        return self.component in TOTALS

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {key: value for key, value in asdict(self).items() if key not in ("kind", "group", "plan", "experts")}


@dataclass(frozen=True)
class ReadRow:
    """A row that can be predicted, priced once."""

    row: Mapping[str, str]
    kind: str
    run: Run
    costs: Costs


def read_rows(tables: Sequence[Table]) -> list[ReadRow | PredictedStep]:
    """Rows of all tables in order; those that can't be predicted already as answers."""
    return [_read(row, table.kind) for table in tables for row in table.rows]


def _read(row: Mapping[str, str], kind: str) -> ReadRow | PredictedStep:
    try:
        run = read_run(row)
        return ReadRow(row, kind, run, costs_of(run.shape, run.layout, run.cluster))
    except ODD as error:
        return _skipped(row, kind, error)


ODD = (AutoparError, ArithmeticError, ValueError, LookupError, MemoryError)
"""What one odd row may raise; it must not end the others."""


def _skipped(row: Mapping[str, str], kind: str, error: BaseException) -> PredictedStep:
    reason = str(error) if isinstance(error, AutoparError) else f"can't be predicted: {type(error).__name__}: {error}"
    return PredictedStep(row.get("row_id", ""), kind, _source(row), skipped_reason=reason)


def _source(row: Mapping[str, str]) -> str:
    return row.get("source_id") or row.get("source", "")


def predict_steps(
    tables: Sequence[Table], constants: Constants | None = None, closed: Closed | None = None
) -> list[PredictedStep]:
    """Predict every row, in order, with the shipped constants unless others are given."""
    known, plain_form = constants or shipped_constants(), closed or shipped_closed()
    return [r if isinstance(r, PredictedStep) else _predicted(r, known, plain_form) for r in read_rows(tables)]


def _predicted(read: ReadRow, constants: Constants, closed: Closed) -> PredictedStep:
    try:
        return predict_row(read, constants, closed)
    except ODD as error:
        return _skipped(read.row, read.kind, error)


def predict_row(read: ReadRow, constants: Constants, closed: Closed) -> PredictedStep:
    """Predict one row."""
    row, run = read.row, read.run
    seconds = step_time(read.costs, constants).step_time_s
    measured, estimated = measured_s(row, run)
    peak = peak_bytes(run.shape, run.layout)
    held = _held(row, read.kind, run, peak)
    component = plain(row.get("component", "")) if read.kind == "memory" else ""
    total = component in TOTALS
    weighed, device = _measured_bytes(row), run.cluster.device
    return PredictedStep(
        row_id=row.get("row_id", ""), kind=read.kind, source_id=_source(row),
        gpu=run.device.name, group=tuple(row.get(column, "") for column in GROUP),
        plan=tuple(row.get(column, "") for column in PLAN),
        predicted_step_time_s=seconds, measured_step_time_s=measured, estimated=estimated,
        ape=abs(seconds / measured - 1) if measured else None,
        baseline_s=constant_share_s(run), closed_form_s=closed_form_s(run, closed), component=component,
        predicted_peak_memory_bytes=held if total else peak.total,
        predicted_component_bytes=None if total else held,
        measured_peak_memory_bytes=weighed, memory_ape=abs(held / weighed - 1) if weighed else None,
        feasible=fits(peak, device) or fits(peak_bytes(run.shape, run.leanest), device),
        oom=row.get("oom") == "1" or row.get("status") == "oom",
        experts=bool(run.shape.experts), assumed=(*run.assumed, *_unread(row)),
    )  # fmt: skip


MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "step_time_est_s", "peak_mem_gb")


def _unread(row: Mapping[str, str]) -> list[str]:
    """What is said of measurements that aren't any: the row is predicted, and not compared with them."""
    given = {column: row[column] for column in MEASURED if row.get(column)}
    return [f"{column}={text!r}: no positive number, left out" for column, text in given.items() if not _positive(text)]


def _positive(text: str) -> bool:
    value = decimal(text)
    return value is not None and value > 0


def measured_s(row: Mapping[str, str], run: Run) -> tuple[float | None, bool]:
    """Measured seconds of a step of a run that ended well, and whether the source's formula was inverted for them."""
    if row.get("status", "ok") not in ("", "ok"):
        return None, False
    stated = decimal(row.get("step_time_s"))
    if stated and stated > 0:
        return stated, False
    rate = decimal(row.get("tokens_per_s_per_gpu"))
    if rate and rate > 0:
        return run.global_batch * run.shape.seq / rate / run.layout.devices, False
    inverted = decimal(row.get("step_time_est_s"))
    return (inverted, True) if inverted and inverted > 0 else (None, False)


def _measured_bytes(row: Mapping[str, str]) -> float | None:
    """Bytes measured. A gigabyte is 1e9, but whole numbers of tools that show GiB are GiB."""
    value = decimal(row.get("peak_mem_gb"))
    if not value or value <= 0:
        return None
    kind = plain(row.get("mem_kind", ""))
    gib = ("nvidia smi" in kind or "integer gib" in kind) and value == int(value)
    return value * (GIB if gib else GB)


def _held(row: Mapping[str, str], kind: str, run: Run, peak: Bytes) -> float:
    """Bytes predicted of what the row measures: a total as its tool sees it, or a component."""
    how = plain(row.get("mem_kind", "")) or run.layout.conventions.shows
    component = plain(row.get("component", "")) if kind == "memory" else ""
    if component in TOTALS:
        if "allocated" in how:
            return peak.tensors
        return peak.tensors + peak.slack if "reserved" in how else peak.total
    group = 0 if "rank 0" in how else run.layout.pp - 1
    here = stage_bytes(run.shape, run.layout, group) if "rank" in how else peak
    return _component(component, here)


def _component(name: str, held: Bytes) -> float:
    parts = {
        "model states": held.states, "states": held.states, "parameters": held.parameters, "weights": held.parameters,
        "gradients": held.gradients, "optimizer": held.optimizer, "optimizer states": held.optimizer,
        "activations": held.activations + KEPT_LOGITS * held.logits,
        "activation peak": held.activations + held.transient - held.gathered,
    }  # fmt: skip
    return parts.get(name, held.tensors)
