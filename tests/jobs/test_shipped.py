"""The jobs in `search/` and the plans they gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.jobs.points import read_jobs
from autopar.jobs.work import FAILED, status_of
from autopar.plan import PlanRecord

SEARCH = Path(__file__).parents[2] / "search"
FILES = sorted(SEARCH.glob("*.toml"))


@pytest.mark.skipif(not FILES, reason="no checkout: the jobs aren't part of the package")
def test_jobs_have_their_plans() -> None:
    """Every job file is in order, and there is a plan, or a proven no, under the name of each of its points."""
    for job in read_jobs(FILES):
        for point in job.points:
            file = job.folder / f"{point.name}.json"
            document = json.loads(file.read_text())
            assert status_of(document) != FAILED
            if "error" not in document:
                record = PlanRecord.from_json(document, str(file))
                assert (record.request.model, record.feasible) == (point.model, True)
                assert point.name in (job.folder / "summary.csv").read_text()
