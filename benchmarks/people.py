"""Found plans beside published ones: predicted seconds of a step on the same model, cluster, batch and memory.

    python -m benchmarks.people ROWS.csv [--minutes 20] [--part 1/4]

Rows of dense models with a whole plan that autopar can run. The published plan is priced by `estimate`, the found one
by `plan`: one cost model, that of autopar's own runs. Smaller clusters come first; a model, cluster and batch is
searched once, whatever many plans of it were published. Beside the gain stands how far `validate` predicts the row
itself off: gains are counted over rows within 15 %, plans that are worse over all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from statistics import median

from autopar.cost.roofline import RooflinePricer
from autopar.dims import Dims
from autopar.errors import AutoparError, ConfigError
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, Request
from autopar.rows import read_tables
from autopar.trace import load_model, trace
from autopar.transformer.constants import shipped_constants
from autopar.validation.plain import shipped_closed
from autopar.validation.runs import Run
from autopar.validation.steps import ReadRow, predict_row, read_rows

MOST_ERROR = 0.15
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""Dtypes of computation whose plans autopar runs."""
NEAR = 1 + 1e-9


@dataclass(frozen=True)
class Published:
    """A row of the table that has a plan of the kind that autopar runs.

    `error` is the share by which `validate` predicts it off, inf where nothing was measured.
    """

    row_id: str
    model: str
    run: Run
    error: float


@dataclass(frozen=True)
class Compared:
    """A published plan beside the found one. `fits` is whether the published one does, by the same cost model."""

    row: Published
    published_s: float
    found_s: float
    fits: bool

    @property
    def worse(self) -> bool:
        """Whether the found plan takes longer than the published one."""
        return self.found_s > self.published_s * NEAR

    def __str__(self) -> str:
        gain, marks = self.published_s / self.found_s - 1, "" if self.fits else "  over memory"
        figures = f"{self.published_s:>11.3f}{self.found_s:>9.3f}{gain:>8.1%}{self.row.error:>11.1%}"
        return _line(self.row, figures + marks + ("  WORSE" if self.worse else ""))


def main() -> None:
    """Print a line a plan, and what they come to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0, help="CPU minutes")
    parser.add_argument("--part", default="1/1", help="which of how many parts of the problems")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    chosen = problems(read(asked.rows))[part - 1 :: parts]
    print(f"{sum(map(len, chosen))} plans of {len(chosen)} models, clusters and batches; figures in seconds a step")
    print(f"{'row':<10}{'model':<22}{'cluster':<22}{'published':>11}{'found':>9}{'gain':>8}{'own error':>11}")
    found: list[Compared] = []
    refused, end_s = 0, time.process_time() + 60 * asked.minutes
    for rows in chosen:
        if time.process_time() > end_s:
            break
        for row, answer in compared(rows):
            print(answer if isinstance(answer, Compared) else _line(row, f"  {str(answer)[:70]}"), flush=True)
            found += [answer] if isinstance(answer, Compared) else []
            refused += not isinstance(answer, Compared)
    counted = [one.published_s / one.found_s - 1 for one in found if one.row.error <= MOST_ERROR]
    print(
        f"{len(found)} plans, {refused} not possible here: {sum(one.worse for one in found)} worse "
        f"({sum(one.worse and one.fits for one in found)} of those that fit)"
        + (f"; {len(counted)} predicted within 15 %: gain {median(counted):.1%} in the median" if counted else "")
    )


def _line(row: Published, text: str) -> str:
    return f"{row.row_id:<10}{row.model[:21]:<22}{row.run.cluster.name[:21]:<22}{text}"


def compared(rows: list[Published]) -> Iterator[tuple[Published, Compared | AutoparError]]:
    """Each different plan of one problem beside the found one, or why that can't be.

    A published plan that needs more memory than the device has by the cost model is held against one found with as
    much.
    """
    planner, found_s = planner_of(rows[0].run), inf
    estimates = {}
    for config, row in {str(config_of(row.run)): row for row in rows}.items():
        try:
            estimates[row.row_id] = row, planner.estimate(ManualConfig.parse(config))
        except AutoparError as reason:
            yield row, reason
    for row, published in sorted(estimates.values(), key=lambda pair: pair[1].peak_tensor_bytes):
        if found_s > published.step_time_s * NEAR:
            try:
                found_s = with_room(planner, published.peak_tensor_bytes).plan().step_time_s
            except AutoparError as reason:
                yield row, reason
                continue
        yield row, Compared(row, published.step_time_s, found_s, published.feasible)


def with_room(planner: Planner, peak_bytes: int) -> Planner:
    """The planner on devices that hold so many bytes of tensors at least."""
    device = planner.cluster.device
    usable_bytes = max(device.usable_bytes, peak_bytes + device.reserve_bytes)
    cluster = replace(planner.cluster, device=replace(device, usable_bytes=usable_bytes))
    return Planner(planner.graph, cluster, RooflinePricer(cluster), planner.request)


def planner_of(run: Run) -> Planner:
    """A planner for the row's model, cluster and batch."""
    where, dtype = run.cluster, DTYPES[run.layout.compute]
    request = Request(
        "published", where.name, where.device.name, where.devices, run.global_batch, dtype, POLICIES[dtype], "adamw"
    )
    graph = graph_of(spec_of(run.shape), run.shape.seq, run.layout.compute)
    return Planner(graph, where, RooflinePricer(where), request)


@lru_cache(maxsize=4)
def graph_of(spec: str, seq_len: int, compute: str) -> OpGraph:
    """The traced model."""
    loaded = load_model(spec, seq_len=seq_len)
    return trace(loaded.model, loaded.inputs, compute_dtype=compute)


def spec_of(shape: Dims) -> str:
    """The dims of a row as a model specification."""
    dims = {
        "layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "ffn": shape.ffn, "vocab": shape.vocab, "tied": int(shape.tied),
        "gated": int(shape.gated),
    }  # fmt: skip
    return ("gpt:" if shape.positions else "llama:") + ",".join(f"{key}={value}" for key, value in dims.items())


def config_of(run: Run) -> ManualConfig:
    """The row's plan. Raises ConfigError where it is none of autopar's."""
    layout = run.layout
    if layout.recomputed not in (0.0, 1.0):
        recompute = f"full:{round(layout.recomputed * run.shape.layers)}"
    else:
        recompute = "full" if layout.recomputed else "selective" if layout.selective else "none"
    staged = layout.pp > 1
    return ManualConfig(
        dp=layout.dp, tp=layout.tp, pp=layout.pp, sp=int(layout.sequence and layout.tp > 1), zero=layout.zero,
        microbatch_size=layout.microbatch, recompute=recompute, devices=layout.devices,
        virtual_stages=layout.chunks if staged else 1, schedule=layout.schedule if staged else "1f1b",
        stage_layers="/".join(map(str, layout.stage_layers)) if staged else "",
    )  # fmt: skip


# --- which rows -----------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[Published]:
    """Rows whose plan autopar may run."""
    constants, closed = shipped_constants(), shipped_closed()
    for one in read_rows(read_tables([path], ("training",))):
        if isinstance(one, ReadRow) and _whole(one.run):
            found = predict_row(one, constants, closed)
            error = inf if found.ape is None or found.estimated else found.ape
            yield Published(one.row["row_id"], one.row["model_name"], one.run, error)


def _whole(run: Run) -> bool:
    """Whether model and plan are of a kind that autopar runs, and the row states the plan's degrees."""
    layout, open_ = run.layout, {text.partition("=")[0] for text in run.assumed}
    try:
        config_of(run)
    except ConfigError:
        return False
    dense = not run.shape.experts and layout.cp == layout.ep == 1
    return (
        dense
        and layout.compute == layout.gemm_dtype
        and layout.compute in DTYPES
        and not open_ & {"dp", "tp", "pp", "micro_batch", "global_batch_seqs"}
    )


def problems(rows: Iterator[Published]) -> list[list[Published]]:
    """Rows by model, cluster, batch and dtype; smaller clusters first."""
    found: dict[object, list[Published]] = {}
    for row in rows:
        key = row.run.shape, row.run.cluster, row.run.global_batch, row.run.layout.compute
        found.setdefault(key, []).append(row)
    return sorted(found.values(), key=lambda same: (same[0].run.cluster.devices, str(same[0].run.shape)))


if __name__ == "__main__":
    main()
