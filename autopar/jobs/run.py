"""Running jobs: what is done already, what is still to be found, and the files that keep it.

Of a finished point there is `NAME.json`, which `autopar explain` reads where it is a plan, and `NAME.log`. The log is
written first and the document last, each whole or not at all: a point whose document is there is finished.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autopar.files import write_atomically
from autopar.jobs.points import Job, Point
from autopar.jobs.ray_cluster import solved_by_ray
from autopar.jobs.summary import csv_text, markdown, outcome_words
from autopar.jobs.team import Solve, solved_by_team
from autopar.jobs.work import FAILED, Result, solve, status_of

Solver = Callable[[Sequence[Point], Solve], Iterator[Result]]


@dataclass(frozen=True)
class Outcome:
    """A point of a job and the document that came of it."""

    job: Job
    point: Point
    document: dict[str, Any]

    @property
    def status(self) -> str:
        """`plan`, `infeasible` or `failed`."""
        return status_of(self.document)


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    resume: bool = False,
    ray: bool = False,
    say: Callable[[str], object] = str,
    solve: Solve = solve,
) -> list[Outcome]:
    """Find the plans of all points and write them, with a summary a job; outcomes in the order of the files.

    With `resume` points that have a plan, or are proven infeasible, are kept; without it what an earlier run left of
    them is replaced as new answers come. Raises OSError where results can't be written.
    """
    places: dict[str, list[Job]] = defaultdict(list)  # points of one name, in whatever files, have one answer
    points: dict[str, Point] = {}
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        for point in job.points:
            if not resume or _finished(job, point) is None:
                places[point.name].append(job)
            points[point.name] = point
    waiting = [points[name] for name in places]
    say(f"{len(points)} points, {len(points) - len(waiting)} of them done")
    deal: Solver = partial(solved_by_ray if ray else solved_by_team, workers=workers)
    for number, result in enumerate(deal(waiting, solve), start=1):
        for job in places[result.name]:
            _keep(job, points[result.name], result)
        say(f"{number}/{len(waiting)} {result.name}: {outcome_words(result.document)}")
    outcomes = [Outcome(job, point, _document(job, point) or {}) for job in jobs for point in job.points]
    for job in jobs:
        rows = [(o.point, o.document) for o in outcomes if o.job is job]
        write_atomically(job.folder / "summary.csv", csv_text(rows))
        write_atomically(job.folder / "summary.md", markdown(job.path.stem, rows))
    return outcomes


def _document_path(job: Job, point: Point) -> Path:
    return job.folder / f"{point.name}.json"


def _keep(job: Job, point: Point, result: Result) -> None:
    path = _document_path(job, point)
    write_atomically(path.with_suffix(".log"), result.log)
    write_atomically(path, json.dumps(result.document, indent=1) + "\n")


def _finished(job: Job, point: Point) -> dict[str, Any] | None:
    """The document of a point that has a plan or is proven infeasible."""
    found = _document(job, point)
    return None if found is None or status_of(found) == FAILED else found


def _document(job: Job, point: Point) -> dict[str, Any] | None:
    """What was written of a point; None where there is nothing that can be read."""
    try:
        found = json.loads(_document_path(job, point).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
