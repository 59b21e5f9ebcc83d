"""A job whose points cost nothing but a moment, run as a process of its own: `python -m tests.jobs.fake JOB LEDGER`.

Each point that is begun leaves a line `NAME PID` in the ledger.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from autopar.jobs.points import Point, read_jobs
from autopar.jobs.run import run_jobs
from autopar.jobs.work import Result

LEDGER = "AUTOPAR_TEST_LEDGER"


def note(point: Point) -> None:
    """Write down that a point is begun."""
    with Path(os.environ[LEDGER]).open("a") as ledger:
        ledger.write(f"{point.name} {os.getpid()}\n")


def begun(ledger: Path) -> list[str]:
    """Names of the points begun so far, in order."""
    return [line.split()[0] for line in ledger.read_text().splitlines()] if ledger.exists() else []


def slowly(point: Point) -> Result:
    """A result after a moment: that the point is infeasible, which is as finished as a plan."""
    note(point)
    time.sleep(0.05)
    document = {"error": {"kind": "InfeasibleError", "message": point.name, "exit_code": 3}}
    return Result(point.name, document, f"log of {point.name}\n")


def mortal(point: Point) -> Result:
    """The process dies at batch 1 the first time, at batch 2 always."""
    first = point.name not in begun(Path(os.environ[LEDGER]))
    if point.global_batch == 2 or (point.global_batch == 1 and first):
        note(point)
        os.kill(os.getpid(), signal.SIGKILL)
    return slowly(point)


if __name__ == "__main__":
    run_jobs(read_jobs([Path(sys.argv[1])]), workers=2, resume=True, solve=slowly)
