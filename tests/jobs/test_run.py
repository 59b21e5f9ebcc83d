"""Running jobs: what is kept, what is found again, and what a killed process costs."""

from __future__ import annotations

import csv
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.cluster.devices import add_device, device_from_figures
from autopar.jobs.points import Job, read_jobs
from autopar.jobs.run import run_jobs
from autopar.jobs.summary import csv_text, markdown
from autopar.jobs.work import solve
from autopar.plan import PlanRecord
from tests.jobs.fake import LEDGER, begun, mortal, slowly

SMALL = "gpt:layers=2,hidden=32,heads=2,vocab=64,seq=16"


def job_of(folder: Path, batches: Sequence[int], clusters: Sequence[str] = ("1xa100-80gb",)) -> Job:
    """A job with a point for each cluster and batch."""
    path = folder / "job.toml"
    path.write_text(
        f'[model]\nspec = "{SMALL}"\n[cluster]\nname = {json.dumps(clusters)}\n'
        f"[training]\nglobal_batch = {json.dumps(list(batches))}\n"
    )
    return read_jobs([path])[0]


def finished(job: Job) -> dict[str, str]:
    """Documents there are, by point."""
    files = {point.name: job.folder / f"{point.name}.json" for point in job.points}
    return {name: file.read_text() for name, file in files.items() if file.exists()}


def kill_and_resume(
    command: list[str], job: Job, times: int, seconds: tuple[float, float], ledger: Path | None
) -> None:
    """Kill the job's process at random moments, then let it end: finished points stay, and aren't begun again."""
    generator = random.Random(3)
    for number in range(times + 1):
        kept, before = finished(job), len(begun(ledger)) if ledger else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if number < times:
            try:
                process.wait(generator.uniform(*seconds))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        process.wait(300)
        now = finished(job)
        assert {name: now.get(name) for name in kept} == kept
        assert all(json.loads(text) and (job.folder / f"{name}.log").exists() for name, text in now.items())
        if ledger:
            assert not set(begun(ledger)[before:]) & set(kept)
    assert set(finished(job)) == {point.name for point in job.points}


def test_a_killed_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice and resumed, a job keeps each finished point, begins none of them again, and leaves no process."""
    job, ledger = job_of(tmp_path, range(1, 25)), tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    kill_and_resume([sys.executable, "-m", "tests.jobs.fake", str(job.path)], job, 2, (0.6, 1.2), ledger)
    assert max(Counter(begun(ledger)).values()) <= 3
    pids = {int(line.split()[1]) for line in ledger.read_text().splitlines()}
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "a worker outlived its job"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_real_search_killed_twenty_times(tmp_path: Path) -> None:
    """`autopar search --resume`, killed with SIGKILL at 20 random moments, has found every plan in the end."""
    job = job_of(tmp_path, [*range(1, 21)], ("1xa100-80gb", "2xa100-80gb"))
    command = [sys.executable, "-m", "autopar", "search", str(job.path), "--workers", "2", "--resume"]
    kill_and_resume(command, job, 20, (2.0, 9.0), None)
    assert all("step_time_s" in json.loads(text) for text in finished(job).values())


def test_dead_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point whose process dies once is tried again; one whose process always dies has failed; others are found."""
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    found = run_jobs([job_of(tmp_path, [1, 2, 3])], workers=2, solve=mortal)
    assert [outcome.status for outcome in found] == ["infeasible", "failed", "infeasible"]
    assert "ended 2 times with code -9" in found[1].document["error"]["message"]
    assert sorted(Counter(begun(ledger)).values()) == [1, 2, 2]


def test_without_resume_all_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run begins every point again; with `resume` it begins those of a changed file alone."""
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    for batches, resume, count in (([1, 2], False, 2), ([1, 2], False, 2), ([2, 3], True, 1)):
        before = len(begun(ledger))
        run_jobs([job_of(tmp_path, batches)], resume=resume, solve=slowly)
        assert len(begun(ledger)) - before == count


def test_resume_finds_again_what_rests_on_other_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device file that has changed, or another version, makes `resume` find its points again, and no others."""
    ledger, added = tmp_path / "ledger", tmp_path / "added"
    monkeypatch.setenv(LEDGER, str(ledger))
    monkeypatch.setattr("autopar.cluster.devices.user_folder", lambda: added)

    def again(tflops: float) -> int:
        device = device_from_figures(
            "mine", tflops=tflops, fp32_tflops=20.0, bandwidth_gbs=900.0, memory_gib=32.0, link_gbs=50.0,
            network_gbs=10.0,
        )  # fmt: skip
        add_device(device)
        before = len(begun(ledger))
        run_jobs([job_of(tmp_path, [1], ("1xmine", "1xa100-80gb"))], resume=True, solve=slowly)
        return len(begun(ledger)) - before

    assert [again(tflops) for tflops in (100.0, 100.0, 110.0)] == [2, 0, 1]
    monkeypatch.setattr("autopar.__version__", "0.0.1")
    assert again(110.0) == 2


def test_without_resume_old_results_stay_until_new_ones_come(tmp_path: Path) -> None:
    """Broken off before its first answer, a run without `resume` has taken nothing away."""
    job = job_of(tmp_path, [1, 2])
    run_jobs([job], solve=slowly)
    before = finished(job)

    def interrupted(text: str) -> None:
        if text.startswith("2 points"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], solve=slowly, say=interrupted)
    assert finished(job) == before != {}


def test_files_that_ask_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point of two files is found once and kept beside both; a file for which it is done already is left alone."""
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (job_of(folder, [1]) for folder in folders)
    found = run_jobs([first, second], solve=slowly)
    assert [outcome.status for outcome in found] == ["infeasible", "infeasible"]
    assert finished(first) == finished(second) != {}
    assert begun(ledger) == [first.points[0].name]
    (second.folder / f"{second.points[0].name}.json").unlink()
    before = finished(first)
    run_jobs([first, second], resume=True, solve=slowly)
    assert finished(first) == finished(second) == before
    assert len(begun(ledger)) == 2


def test_plans_and_summaries(tmp_path: Path) -> None:
    """Plans are what `autopar explain` reads; the tables have a line a point, and say why there is no plan."""
    job = job_of(tmp_path, [2])
    job.path.write_text(job.path.read_text() + 'memory_limit = ["1GiB", 1000]\n')
    (job,) = read_jobs([job.path])
    found = [solve(point) for point in job.points]
    assert [result.status for result in found] == ["plan", "infeasible"]
    record = PlanRecord.from_json(found[0].document)
    assert (record.request.memory_limit_bytes, record.request.model) == (1 << 30, SMALL)
    assert "How sure" in found[0].log
    rows = list(zip(job.points, (result.document for result in found), strict=True))
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [(row["status"], row["cluster"], row["memory_limit"]) for row in read] == [
        ("plan", "1xa100-80gb", "1GiB"),
        ("infeasible", "1xa100-80gb", "1000"),
    ]
    assert float(read[0]["step_time_s"]) == record.step_time_s
    assert "memory is the binding limit" in read[1]["message"]
    text = markdown("job", rows)
    assert text.count("| 1xa100-80gb |") == 1
    assert text.count("infeasible: memory is the binding limit") == 1
