"""Jobs over a local Ray cluster."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from autopar.jobs.run import run_jobs
from tests.jobs.fake import LEDGER, begun, mortal
from tests.jobs.test_run import job_of

pytest.importorskip("ray", reason="needs the extra `ray`")
TIMES = ("trace_s", "search_s")


@pytest.mark.slow
def test_the_same_plans(tmp_path: Path) -> None:
    """Processes of this machine and of a Ray cluster find the same plans."""
    documents = []
    for ray in (False, True):
        found = run_jobs([job_of(tmp_path, [4, 8], ("2xa100-80gb",))], workers=2, ray=ray)
        documents.append([{k: v for k, v in o.document.items() if k not in TIMES} for o in found])
    assert json.dumps(documents[0]) == json.dumps(documents[1])
    assert all("step_time_s" in document for document in documents[0])


@pytest.mark.slow
def test_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of a Ray worker that is killed is done by another; a point that kills every worker has failed."""
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    found = run_jobs([job_of(tmp_path, [1, 2, 3])], workers=2, ray=True, solve=mortal)
    assert [outcome.status for outcome in found] == ["infeasible", "failed", "infeasible"]
    assert sorted(Counter(begun(ledger)).values()) == [1, 2, 2]
