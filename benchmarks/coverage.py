"""Which models can be traced, planned and run, and whether they then compute what one device computes.

    python -m benchmarks.coverage [NAME...]

Every model of `coverage_models.py` is traced, planned by the search for four devices, and run on four processes under
plans that are unlike each other. Loss and gradients are compared, on the whole global batch, with the model on one
device; both compute in float64 everywhere, also where the model asks for float32. It writes docs/models.md, with names
only their rows.
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
PIPELINED, SEARCHED = "pp=2,dp=2,microbatch_size=2", "search"
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
    """What became of one model: the largest difference by run, and what went wrong by step."""

    name: str
    graph: OpGraph | None = None
    runs: dict[str, float] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def green(self) -> bool:
        """Whether all went well."""
        return not self.trouble and bool(self.runs)

    def cell(self, what: str) -> str:
        """The result of one run, in few characters."""
        if what in self.trouble:
            return "**no**"
        return f"{self.runs[what]:.0e}" if what in self.runs else "-"

    def remarks(self) -> str:
        """What to know: why something failed, what is one operator, why the batch isn't split in time."""
        found = [f"{what}: {why.strip().splitlines()[-1][:300]}" for what, why in self.trouble.items()]
        if self.graph is not None:
            found += [note.partition(": ")[0] for note in self.graph.assumptions]
            if not self.graph.separable:
                found.append(f"one microbatch: {self.graph.why_not_separable}")
        return "; ".join(found).replace("|", "\\|")


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
        configs = [*CONFIGS, *([PIPELINED] if row.graph.separable else [])]
        for text in ("", *configs):
            what = text.partition(",microbatch")[0] or SEARCHED
            try:
                row.runs[what] = _difference(pool, row.graph, name, text)
            except Exception as error:
                row.trouble[what] = _why(error)
    row.wall_s = time.perf_counter() - began
    return row


def _difference(pool: Pool, graph: OpGraph, name: str, text: str) -> float:
    """The largest relative difference of loss and gradients under a plan: that of `text`, or the one that is found."""
    cluster = load_cluster(f"{RANKS}xa100-80gb")
    request = Request("coverage", cluster.name, "cpu", RANKS, GLOBAL_BATCH, "fp64", POLICIES["fp64"], "adamw")
    planner = Planner(graph, cluster, RooflinePricer(cluster), request)
    record = planner.plan(ManualConfig.parse(text) if text else None)
    report = pool.run(RANKS, check, record, graph, name, timeout_s=300.0)[0]
    if report["missing_gradients"]:
        raise AutoparError(f"no gradient of {', '.join(report['missing_gradients'][:3])}")
    found = max(report["loss_difference"], report["gradient"]["value"])
    if not found < TOLERANCE:
        raise AutoparError(f"differs by {found:.1e} (loss {report['loss_difference']:.1e}, {report['gradient']})")
    return float(found)


def _why(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))[-3000:].strip()


RUNS = (SEARCHED, *(text.partition(",microbatch")[0] for text in (*CONFIGS, PIPELINED)))


def line(row: Row) -> str:
    """A row of the table."""
    cells = " | ".join(row.cell(what) for what in RUNS)
    return f"| {row.name} | {'yes' if row.graph else '**no**'} | {cells} | {row.remarks()} |"


def lines_of(page: str) -> dict[str, str]:
    """The rows of a page, by model."""
    found = {text.split("|")[1].strip(): text for text in page.splitlines() if text.startswith("| ")}
    return {name: found[name] for name in MODELS if name in found}


def page(lines: dict[str, str]) -> str:
    """The table as a page of the documentation, in the order of the models."""
    right = sum("**no**" not in text for text in lines.values())
    head = [
        "# Models",
        "",
        f"Written by `python -m benchmarks.coverage`: {right} of {len(lines)} models are right in every plan tried.",
        "",
        "Each model is a small random one of its class, in float64 and in training, without dropout. It is traced,",
        "planned for four devices (by the search, and as written in the head of the columns) and run on four",
        "processes. Figures are the largest relative difference of the loss or of a gradient to the model on one",
        f"device, on the whole global batch of {GLOBAL_BATCH}; at most {TOLERANCE:g} counts as right. A dash: the",
        "plan is not legal, as the batch can't be split in time.",
        "",
        f"| model | traced | {' | '.join(RUNS)} | remarks |",
        f"|{'---|' * (len(RUNS) + 3)}",
    ]
    return "\n".join([*head, *(lines[name] for name in MODELS if name in lines), ""])


def main(names: list[str]) -> None:
    """Examine the models, print a line each, and write the page."""
    warnings.simplefilter("ignore")
    pool = Pool()
    rows = []
    for name in names or MODELS:
        row = examine(pool, name)
        rows.append(row)
        worst = {what: f"{value:.0e}" for what, value in row.runs.items()}
        print(f"{'ok ' if row.green else 'BAD'} {name:32s} {row.wall_s:5.1f} s {worst}", flush=True)
        for what, why in row.trouble.items():
            print(f"    {what}: {why}", flush=True)
    print(f"{sum(r.green for r in rows)} of {len(rows)} right in every plan")
    pool.close()
    kept = lines_of(PAGE.read_text()) if names else {}
    PAGE.write_text(page(kept | {row.name: line(row) for row in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
