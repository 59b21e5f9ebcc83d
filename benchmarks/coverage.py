"""Which models can be traced, planned and run, and whether they then compute what one device computes.

    python -m benchmarks.coverage [NAME...]

Every model of `coverage_models.py` is traced, planned by the search for four devices, and run on four processes under
plans that are unlike each other. Loss and gradients are compared, on the whole global batch, with the model on one
device; both compute in float64 everywhere, also where the model asks for float32. Without names it writes
docs/models.md.
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.errors import AutoparError
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.trace.capture import trace
from autopar.verify import verify
from benchmarks.coverage_models import MODELS, example
from tests.pool import Pool

RANKS, GLOBAL_BATCH, TOLERANCE = 4, 8, 1e-9
CONFIGS = ("dp=4,microbatch_size=2", "dp=4,zero=3,microbatch_size=2", "tp=2,dp=2,microbatch_size=4")
PIPELINED = "pp=2,dp=2,microbatch_size=2"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"


class Float64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {k: _widened(v) for k, v in (kwargs or {}).items()}
        return func(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def check(record: PlanRecord, graph: OpGraph, name: str) -> dict[str, Any]:
    """On a rank: loss and gradients against the model on one device."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    with Float64():
        model, inputs = example(name)
        return verify(record, model, inputs, graph=graph, steps=1).to_json()


@dataclass
class Row:
    """What became of one model."""

    name: str
    graph: OpGraph | None = None
    planned: str = ""
    runs: dict[str, float] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def green(self) -> bool:
        """Whether all went well."""
        return not self.trouble and bool(self.runs) and max(self.runs.values()) < TOLERANCE


def examine(pool: Pool, name: str) -> Row:
    """Trace, plan, run and compare one model."""
    row, began = Row(name), time.perf_counter()
    try:
        torch.set_default_dtype(torch.float64)
        with Float64():
            model, inputs = example(name)
            row.graph = trace(model, inputs, compute_dtype="float64")
    except Exception as error:
        row.trouble["trace"] = _why(error)
    finally:
        torch.set_default_dtype(torch.float32)
    if row.graph:
        _run(pool, row, row.graph)
    row.wall_s = time.perf_counter() - began
    return row


def _run(pool: Pool, row: Row, graph: OpGraph) -> None:
    cluster = load_cluster(f"{RANKS}xa100-80gb")
    policy = POLICIES["fp64"]
    request = Request("coverage", cluster.name, "cpu", RANKS, GLOBAL_BATCH, "fp64", policy, "adamw")
    for text in ("", *CONFIGS, *([PIPELINED] if graph.separable else [])):
        what = text.partition(",microbatch")[0] or "search"
        try:
            planner = Planner(graph, cluster, RooflinePricer(cluster), request)
            record = planner.plan(ManualConfig.parse(text) if text else None)
            report = pool.run(RANKS, check, record, graph, row.name, timeout_s=120.0)[0]
            missing = report["missing_gradients"]
            row.runs[what] = max(report["loss_difference"], report["gradient"]["value"])
            if missing or not row.runs[what] < TOLERANCE:
                row.trouble[what] = f"missing {missing[:3]}" if missing else f"{row.runs[what]:.1e} in {report}"
        except Exception as error:
            row.trouble[what] = _why(error)


def _why(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))[-3000:]


def main(names: list[str]) -> None:
    """Examine the models, print a line each."""
    warnings.simplefilter("ignore")
    pool = Pool()
    rows = []
    for name in names or MODELS:
        row = examine(pool, name)
        rows.append(row)
        separable = bool(row.graph and row.graph.separable)
        notes = row.graph.assumptions if row.graph else ()
        worst = {what: f"{value:.0e}" for what, value in row.runs.items()}
        print(f"{'ok ' if row.green else 'BAD'} {name:32s} {row.wall_s:5.1f} s {worst}", flush=True)
        for what, why in row.trouble.items():
            print(f"    {what}: {why}", flush=True)
        for note in notes:
            print(f"    note: {note}", flush=True)
        if row.graph and not separable:
            print(f"    {row.graph.why_not_separable}")
    print(f"{sum(r.green for r in rows)} of {len(rows)} green")
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
