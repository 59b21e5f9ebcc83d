"""Found plans beside published ones: predicted seconds of a step on the same model, cluster, batch and memory.

    python -m benchmarks.people ROWS.csv [--minutes 20]

Counted are rows of dense models with a whole plan that autopar can run, which `validate` predicts within 15 %. The
published plan is priced by `estimate`, the found one by `plan`: one cost model, that of autopar's own runs. Rows are
taken from each source in turn, one of each model and cluster, until the CPU minutes are over. Beside the gain stands
how far the row itself is predicted off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from statistics import median

from autopar.cost.roofline import RooflinePricer
from autopar.errors import AutoparError, ConfigError
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, Request
from autopar.rows import read_tables
from autopar.trace import load_model, trace
from autopar.transformer.constants import shipped_constants
from autopar.transformer.dims import Shape
from autopar.validation.plain import shipped_closed
from autopar.validation.runs import Run
from autopar.validation.steps import PredictedStep, ReadRow, predict_row, read_rows

MOST_ERROR = 0.15
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""Dtypes of computation whose plans autopar runs."""
NEAR = 1 + 1e-9


def main() -> None:
    """Print a line a row, and what they come to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    asked = parser.parse_args()
    chosen = list(in_turn(counted(asked.rows)))
    print(f"{len(chosen)} rows of different models and clusters; figures in seconds a step")
    print(f"{'row':<9}{'model':<22}{'cluster':<22}{'published':>11}{'found':>9}{'gain':>8}{'own error':>11}")
    gains, worse, refused, end_s = [], 0, 0, time.process_time() + 60 * asked.minutes
    for row, run, error in chosen:
        if time.process_time() > end_s:
            break
        try:
            published, found = both(run)
        except AutoparError as reason:
            refused += 1
            print(
                f"{row['row_id']:<9}{row['model_name'][:21]:<22}{run.cluster.name[:21]:<22}  {str(reason)[:70]}",
                flush=True,
            )
            continue
        gains.append(published / found - 1)
        worse += found > published * NEAR
        print(
            f"{row['row_id']:<9}{row['model_name'][:21]:<22}{run.cluster.name[:21]:<22}{published:>11.3f}{found:>9.3f}"
            f"{gains[-1]:>8.1%}{error:>11.1%}{'  WORSE' if found > published * NEAR else ''}",
            flush=True,
        )
    if gains:
        print(f"{len(gains)} rows, {refused} not possible here: {worse} worse; gain {median(gains):.1%} in the median")


def both(run: Run) -> tuple[float, float]:
    """Seconds of the published plan and of the found one."""
    planner = planner_of(run)
    return planner.estimate(config_of(run)).step_time_s, planner.plan().step_time_s


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


def spec_of(shape: Shape) -> str:
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

Counted = tuple[dict[str, str], Run, float]


def counted(path: Path) -> Iterator[Counted]:
    """Rows that are predicted well enough and whose plan autopar may run, with the error of the prediction."""
    constants, closed = shipped_constants(), shipped_closed()
    for read in read_rows(read_tables([path], ("training",))):
        if isinstance(read, ReadRow) and _whole(read.run):
            found: PredictedStep = predict_row(read, constants, closed)
            if found.ape is not None and found.ape <= MOST_ERROR and not found.estimated:
                yield dict(read.row), read.run, found.ape


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


def in_turn(rows: Iterator[Counted]) -> Iterator[Counted]:
    """One row of each model and cluster, smaller clusters of a source first, from each source in turn."""
    sources: dict[str, dict[object, Counted]] = {}
    for row, run, error in rows:
        key = run.shape, run.cluster.name
        sources.setdefault(row.get("source_id", ""), {}).setdefault(key, (row, run, error))
    each: list[Sequence[Counted]] = [sorted(s.values(), key=lambda c: c[1].cluster.devices) for s in sources.values()]
    for picked in zip_longest(*each):
        yield from (one for one in picked if one is not None)


if __name__ == "__main__":
    main()
