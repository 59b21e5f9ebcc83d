"""Run a benchmark's function on several local processes, and get rank 0's answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def inside() -> bool:
    """Whether this process is one of the ranks."""
    return "RANK" in os.environ


def launch(module: str, ranks: int, timeout_s: float = 1200.0) -> Any:
    """Start `python -m module` on `ranks` processes of one thread; what rank 0 gave to `answer`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answer.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        environment = {**os.environ, **quiet, "AUTOPAR_BENCHMARK_ANSWER": str(path)}
        subprocess.run([*command, "-m", module], env=environment, check=True, timeout=timeout_s)
        return json.loads(path.read_text())


def answer(value: Any) -> None:
    """On rank 0: hand plain data to the process that launched the ranks."""
    if os.environ["RANK"] == "0":
        Path(os.environ["AUTOPAR_BENCHMARK_ANSWER"]).write_text(json.dumps(value))
