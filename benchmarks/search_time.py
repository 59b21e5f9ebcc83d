"""CPU seconds and memory of planning large models offline: trace to plan, one process each.

python -m benchmarks.search_time
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

LLAMA_70B = "llama:layers={layers},hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=32000"
CASES = (
    ("70B Llama dims, 128 A100", LLAMA_70B.format(layers=80), 4096, "16x8xa100-80gb", 512),
    ("the same, 40 layers", LLAMA_70B.format(layers=40), 4096, "16x8xa100-80gb", 512),
    ("7B Llama dims, 8 A100 of 40 GB", "llama-7b", 2048, "8xa100-40gb", 64),
    ("GPT-2, 8 A100", "gpt2", 1024, "8xa100-80gb", 64),
)


def measure(spec: str, seq_len: int, cluster: str, batch: int) -> dict[str, Any]:
    """Plan in this process; its own account of CPU seconds and the largest resident size."""
    import autopar
    from autopar.trace import load_model

    began = time.process_time()
    loaded = load_model(spec, seq_len=seq_len)
    plan = autopar.plan(loaded.model, loaded.inputs, cluster=cluster, global_batch=batch)
    return {
        "cpu_s": time.process_time() - began,
        "trace_s": plan.trace_s,
        "search_s": plan.search_s,
        "step_time_s": plan.step_time_s,
        "gap": plan.gap,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Print one line a case."""
    print(f"{'case':34s}{'trace s':>9s}{'search s':>10s}{'all s':>8s}{'GiB':>7s}{'step s':>9s}{'gap':>7s}")
    for name, *case in CASES:
        command = [sys.executable, "-m", "benchmarks.search_time", json.dumps(case)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(
            f"{name:34s}{found['trace_s']:9.2f}{found['search_s']:10.2f}{found['cpu_s']:8.2f}"
            f"{found['rss_bytes'] / 2**30:7.2f}{found['step_time_s']:9.3f}{found['gap']:7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        main()
