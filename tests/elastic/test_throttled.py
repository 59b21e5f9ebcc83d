"""A process that is really slowed: stopped two thirds of the time, as containers over their share are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.trace.models.spec import load_model
from tests.pool import Pool

MODEL = "gpt:layers=6,hidden=128,heads=4,vocab=512,seq=64"
STEPS, PATIENCE, SLOW_FROM, SLOW = 24, 4, 8, 1

THROTTLE = """
import os, signal, sys, time
pid, flag = int(sys.argv[1]), sys.argv[2]
while not os.path.exists(flag):
    time.sleep(0.001)
try:
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.008)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.004)
finally:
    os.kill(pid, signal.SIGCONT)
"""


def run(flag: str | None) -> tuple[list[float], list[int], list[tuple[int, ...]]]:
    """Losses, the steps after which plans changed, and the devices of the last plan's stages."""
    loaded = load_model(MODEL)
    asked: dict[str, Any] = {
        "cluster": "local",
        "global_batch": 8,
        "dtype": "fp64",
        "config": autopar.ManualConfig(dp=2),
    }
    assert isinstance(loaded.inputs, dict)
    pm = autopar.optimize(loaded.model, loaded.inputs, **asked)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
    elastic = autopar.Elastic(
        loaded.model, pm, optimizer, steps=100_000, patience=PATIENCE, tolerance=0.6, change_s=1.0
    )
    losses, changes = list[float](), list[int]()
    for step in range(1, STEPS + 1):
        if flag is not None and step == SLOW_FROM:
            Path(flag).touch()
        numbers = torch.Generator().manual_seed(step)
        ids = torch.randint(512, (8, 64), generator=numbers)
        rows = pm.data_parallel_rows()
        batch = {} if rows is None else dict.fromkeys(loaded.inputs, ids[rows])
        losses.append(pm.train_step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
        if flag is not None and elastic.step():
            changes.append(step)
    return losses, changes, [stage.devices for stage in pm.record.stages]


@pytest.mark.slow
def test_a_throttled_process(pool: Pool, tmp_path: Path) -> None:
    """A process slowed three times is seen by its own timings and given less to do; the losses stay what they are."""
    whole, _, _ = pool.run(2, run, None, timeout_s=200)[0]
    flag = tmp_path / "slow"
    pids = pool.run(2, _pid)
    throttle = subprocess.Popen([sys.executable, "-c", THROTTLE, str(pids[SLOW]), str(flag)])
    try:
        losses, changes, _ = pool.run(2, run, str(flag), timeout_s=280)[0]
    finally:
        throttle.terminate()
        throttle.wait()
        pool.close()  # it may have been stopped when its throttle ended
    assert losses == pytest.approx(whole, rel=1e-9)
    assert changes
    assert SLOW_FROM + PATIENCE - 1 <= changes[0] <= SLOW_FROM + PATIENCE + 1


def _pid() -> int:
    import os

    return os.getpid()
