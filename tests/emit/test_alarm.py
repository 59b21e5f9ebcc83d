"""A rank that fails takes the job down with its own error first: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.emit import alarm
from autopar.emit.build import emit
from autopar.errors import EmitError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from tests.emit.test_pipeline import batch, rows
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.pool import Pool, RankError


def failing(record: PlanRecord, graph: OpGraph, said: Path, ends: bool) -> None:
    """Rank 0's last layer fails in the second step; its script ends then, or goes on for long."""
    alarm.GRACE_S = 0.3
    pm, full = emit(record, graph, example("skips")[0], device="cpu"), batch("skips")
    pm.train_step(**rows(pm, full))
    if dist.get_rank() == 1:
        sys.stderr = said.open("w")
        try:
            pm.train_step(**rows(pm, full))
        except EmitError as error:
            said.write_text(str(error))
            raise
    pm.runtimes[-1].stage.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pm.train_step(**rows(pm, full))
    if ends:
        os._exit(3)
    while not (said.exists() and "ends" in said.read_text()):
        time.sleep(0.1)


SLOW = pytest.mark.slow
CASES = [
    ("dp=1|dp=1", False), ("dp=2", True), pytest.param("dp=1|dp=1", True, marks=SLOW),
    pytest.param("dp=2", False, marks=SLOW), pytest.param("tp=2", False, marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ends"), CASES)
def test_ranks_that_wait_for_one_that_failed_end(pool: Pool, text: str, ends: bool, tmp_path: Path) -> None:
    """Whether its process ends or goes on: they say who failed first, with what and at which step."""
    texts, graph = text.split("|"), traced("skips")
    plan = staged(graph, ("dp=1", "dp=1"), (3, 3), "1f1b", 4) if len(texts) > 1 else one_stage(graph, text, 2, 16)
    with pytest.raises(RankError):
        pool.run(2, failing, plan, graph, tmp_path / "said", ends)
    about = "The first to fail was " if ends else "waits for a rank that has failed, and ends. "
    assert f"{about}rank 0 at step 2: ZeroDivisionError: division by zero" in (tmp_path / "said").read_text()


def alike(record: PlanRecord, graph: OpGraph) -> None:
    alarm.GRACE_S = 0.3
    pm, full = emit(record, graph, example("skips")[0], device="cpu"), batch("skips")
    for late_s in (1.5, 0):
        time.sleep(late_s * dist.get_rank())
        with pytest.raises(EmitError, match="inputs missing"):
            pm.train_step()
        pm.train_step(**rows(pm, full))


def test_a_batch_that_all_refuse_harms_nothing(pool: Pool) -> None:
    """Where every rank fails alike, though one sooner, the next step runs."""
    graph = traced("skips")
    pool.run(2, alike, one_stage(graph, "dp=2", 2, 16), graph)


ENDS_WHILE_WATCHED = """
import time
from torch.distributed import PrefixStore, TCPStore
from autopar.emit import alarm

alarm.PERIOD_S = 0.0
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
watched = alarm.Alarm(PrefixStore("job", client))
watched.since_s = 0.0
watched.failure = lambda: any(client.check(["failed"]) for _ in range(1000))
alarm._WATCH.look_at(watched)
time.sleep(0.2)
"""


def test_a_process_ends_while_it_looks_for_failures() -> None:
    """It looks all the time, inside torch's code, which the end of the interpreter must not break off."""
    command = [sys.executable, "-c", ENDS_WHILE_WATCHED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
