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
from autopar.jobs.basis import basis
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

    With `resume` points that have a plan, or are proven infeasible, are kept unless that rests on another version or
    on other prices; without it what an earlier run left of them is replaced as new answers come. Raises OSError where
    results can't be written.
    """
    rests_on = _Bases()
    places: dict[str, list[Job]] = defaultdict(list)  # points of one name, in whatever files, have one answer
    points: dict[str, Point] = {}
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        for point in job.points:
            if not resume or not _finished(job, point, rests_on):
                places[point.name].append(job)
            points[point.name] = point
    waiting = [points[name] for name in places]
    say(f"{len(points)} points, {len(points) - len(waiting)} of them done")
    deal: Solver = partial(solved_by_ray if ray else solved_by_team, workers=workers)
    for number, result in enumerate(deal(waiting, solve), start=1):
        for job in places[result.name]:
            _keep(job, points[result.name], result, rests_on)
        say(f"{number}/{len(waiting)} {result.name}: {outcome_words(result.document)}")
    outcomes = [Outcome(job, point, _document(job, point) or {}) for job in jobs for point in job.points]
    for job in jobs:
        rows = [(o.point, o.document) for o in outcomes if o.job is job]
        write_atomically(job.folder / "summary.csv", csv_text(rows))
        write_atomically(job.folder / "summary.md", markdown(job.path.stem, rows))
    return outcomes


def _document_path(job: Job, point: Point) -> Path:
    return job.folder / f"{point.name}.json"


class _Bases:
    """What points rest on, found once for each cluster and profile."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None], dict[str, str]] = {}

    def of(self, point: Point) -> dict[str, str]:
        """The basis of a point's answer."""
        key = point.cluster, point.profile
        if key not in self._found:
            self._found[key] = basis(*key)
        return self._found[key]


def _keep(job: Job, point: Point, result: Result, rests_on: _Bases) -> None:
    path = _document_path(job, point)
    write_atomically(path.with_suffix(".log"), result.log)
    write_atomically(path, json.dumps({**result.document, "rests_on": rests_on.of(point)}, indent=1) + "\n")


def _finished(job: Job, point: Point, rests_on: _Bases) -> bool:
    """Whether there is a plan of the point, or a proof that there is none, by this version and today's prices."""
    found = _document(job, point)
    return found is not None and status_of(found) != FAILED and found.get("rests_on") == rests_on.of(point)


def _document(job: Job, point: Point) -> dict[str, Any] | None:
    """What was written of a point; None where there is nothing that can be read."""
    try:
        found = json.loads(_document_path(job, point).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
