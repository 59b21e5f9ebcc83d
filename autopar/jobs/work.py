"""One point of a job: finding its plan, and what is written of it."""

from __future__ import annotations

import io
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from autopar.errors import AutoparError, InfeasibleError, as_document
from autopar.jobs.points import Point

PLAN, INFEASIBLE, FAILED = "plan", "infeasible", "failed"


@dataclass(frozen=True)
class Result:
    """What came of a point: the JSON document that `autopar plan --json` prints, and a log in text."""

    name: str
    document: dict[str, Any]
    log: str

    @property
    def status(self) -> str:
        """`plan`, `infeasible` (proven), or `failed`."""
        return status_of(self.document)


def status_of(document: dict[str, Any]) -> str:
    """The status of a result by its document."""
    if "error" not in document:
        return PLAN
    return INFEASIBLE if document["error"]["exit_code"] == InfeasibleError.exit_code else FAILED


def solve(point: Point) -> Result:
    """Find the plan of a point in this process. Nothing is raised, and what is printed meanwhile is in the log."""
    printed = io.StringIO()
    began, wall_s, cpu_s = datetime.now(UTC), time.monotonic(), time.process_time()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            document, words = _planned(point)
        except Exception as error:
            document = as_document(error)
            words = str(error) if isinstance(error, AutoparError) else traceback.format_exc()
    lines = [f"{key} = {value}" for key, value in asdict(point).items() if key != "spec" and value not in (None, ())]
    lines.append(f"began {began:%Y-%m-%d %H:%M:%S} UTC")
    lines.append(f"took {time.monotonic() - wall_s:.1f} s, {time.process_time() - cpu_s:.1f} s of CPU")
    return Result(point.name, document, "\n".join([*lines, "", printed.getvalue() + words, ""]))


def _planned(point: Point) -> tuple[dict[str, Any], str]:
    from autopar import api
    from autopar.trace import load_model

    loaded = load_model(point.spec, seq_len=point.seq_len)
    found = api.plan(
        loaded.model,
        loaded.inputs,  # type: ignore[arg-type]
        cluster=point.cluster,
        global_batch=point.global_batch,
        dtype=point.dtype,
        optimizer=point.optimizer,
        memory_limit=point.memory_limit,
        objective=point.objective,
        constraints=point.constraints,
        profile=point.profile,
        top=point.top,
        seed=point.seed,
        time_limit_s=point.time_limit_s,
        name=point.model,
    )
    return found.to_json(), found.explain()
