"""Predictions for rows of training and memory tables: seconds of a step, bytes at its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.rows import Table
from autopar.transformer.constants import Constants, shipped_constants
from autopar.transformer.memory import fits, peak_bytes
from autopar.transformer.step import Costs, costs_of, step_time
from autopar.validation.measures import component_of, held_bytes, measured_bytes, measured_s, ran_out, unread
from autopar.validation.plain import Closed, closed_form_s, constant_share_s, shipped_closed
from autopar.validation.runs import Run, read_run
from autopar.validation.words import plain

GROUP = ("source_id", "model_name", "framework", "layers", "hidden", "heads", "seq_len", "gpu", "gpus",
         "global_batch_seqs", "dtype")  # fmt: skip
"""Columns that plans of one group share: they differ in how the same step is spread over the same devices."""

PLAN = ("dp", "tp", "pp", "cp", "ep", "virtual_stages", "schedule", "zero_stage", "sequence_parallel", "recompute",
        "micro_batch", "flash_attention")  # fmt: skip
"""Columns that make a plan; rows that agree in all of them are one plan run again."""


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
        return not self.component

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
    parts = component_of(row) if read.kind == "memory" else ()
    held, weighed, device = held_bytes(row, parts, run, peak), measured_bytes(row), run.cluster.device
    return PredictedStep(
        row_id=row.get("row_id", ""), kind=read.kind, source_id=_source(row),
        gpu=run.device.name, group=tuple(row.get(column, "") for column in GROUP),
        plan=tuple(row.get(column, "") for column in PLAN),
        predicted_step_time_s=seconds, measured_step_time_s=measured, estimated=estimated,
        ape=abs(seconds / measured - 1) if measured else None,
        baseline_s=constant_share_s(run), closed_form_s=closed_form_s(run, closed),
        component=plain(row["component"]) if parts else "",
        predicted_peak_memory_bytes=peak.total if parts else held,
        predicted_component_bytes=held if parts else None,
        measured_peak_memory_bytes=weighed, memory_ape=abs(held / weighed - 1) if weighed else None,
        feasible=fits(peak, device) or fits(peak_bytes(run.shape, run.leanest), device),
        oom=ran_out(row),
        experts=bool(run.shape.experts), assumed=(*run.assumed, *unread(row)),
    )  # fmt: skip
