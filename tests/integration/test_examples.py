"""The examples, run as a person would: under torchrun on two processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(processes: int, script: str, *arguments: str) -> str:
    """What a script prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    found = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=560, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def losses(printed: str) -> dict[int, float]:
    """The losses by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss (\S+)", printed)}


@pytest.mark.slow
def test_pretraining_goes_on_on_other_processes(tmp_path: Path) -> None:
    """Two processes, then one that resumes, lose what two without a break do; the trace names the layers."""
    whole = losses(run(2, "pretrain.py", "--folder", str(tmp_path / "a"), "--steps", "6", "--dtype", "fp64"))
    options = ("pretrain.py", "--folder", str(tmp_path / "b"), "--dtype", "fp64", "--save-every", "2", "--steps")
    begun = losses(run(2, *options, "4", "--profile", "2"))
    printed = run(1, *options, "6")
    assert "goes on after step 4" in printed
    rest = losses(printed)
    assert [*begun] == [1, 2, 3, 4]
    assert [*rest] == [5, 6]
    assert (begun | rest) == pytest.approx(whole, abs=1e-7)
    names = {event.get("name") for event in json.loads((tmp_path / "b" / "trace.json").read_text())["traceEvents"]}
    assert "blocks.0" in names


@pytest.mark.slow
def test_pretraining_goes_on_without_a_machine_that_dies(tmp_path: Path) -> None:
    """Of two agents with a process each one is killed: the other goes on alone, and loses what a whole run does."""
    whole = losses(run(2, "pretrain.py", "--folder", str(tmp_path / "a"), "--steps", "30", "--dtype", "fp64"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", "--rdzv-conf=last_call_timeout=2",
        str(EXAMPLES / "pretrain.py"), "--folder", str(tmp_path / "b"), "--steps", "30", "--dtype", "fp64",
        "--save-every", "3",
    ]  # fmt: skip
    agents = []
    try:
        for name in ("one", "other"):
            with (tmp_path / name).open("w") as out:
                agents.append(subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
            time.sleep(1)  # the first one makes the store, and outlives the other
        said = [tmp_path / "one", tmp_path / "other"]
        wait_for(lambda: any("step 8 " in file.read_text() for file in said), 300)
        for pid in children_of(agents[1].pid):
            os.kill(pid, signal.SIGKILL)
        agents[1].kill()
        assert agents[0].wait(300) == 0, said[0].read_text()[-3000:]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    printed = said[0].read_text()
    assert "1 processes" in printed
    after = losses(printed[printed.index("1 processes") :])
    assert 3 <= min(after) <= 16
    assert max(after) == 30
    assert after == pytest.approx({step: whole[step] for step in after}, abs=1e-6)


def wait_for(happened: Callable[[], bool], timeout_s: float) -> None:
    """Until something has happened."""
    end_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end_s, f"it has not happened within {timeout_s:g} s"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_fine_tuning_learns_and_is_not_done_twice(tmp_path: Path) -> None:
    """The loss falls from epoch to epoch, and a second run finds all epochs done."""
    pytest.importorskip("transformers")
    found = losses(run(2, "finetune_hf.py", "--output", str(tmp_path), "--epochs", "3"))
    assert [*found] == [8, 16, 24]
    assert found[24] < 0.8 * found[8]
    assert losses(run(2, "finetune_hf.py", "--output", str(tmp_path), "--epochs", "3")) == {}
