"""The examples, run as a person would: under torchrun on two processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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
def test_fine_tuning_learns_and_is_not_done_twice(tmp_path: Path) -> None:
    """The loss falls from epoch to epoch, and a second run finds all epochs done."""
    pytest.importorskip("transformers")
    found = losses(run(2, "finetune_hf.py", "--output", str(tmp_path), "--epochs", "3"))
    assert [*found] == [8, 16, 24]
    assert found[24] < 0.8 * found[8]
    assert losses(run(2, "finetune_hf.py", "--output", str(tmp_path), "--epochs", "3")) == {}
