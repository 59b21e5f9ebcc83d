"""How long it takes to emit a plan of a large model, and how much memory: on meta, for each rank of a stage.

    python -m benchmarks.emission [--model "llama:..."] [--config tp=8,pp=8,microbatch_size=1] [--devices 64]

Each rank of the first stage and of the last is a process of its own, one after the other, whose process groups send
nothing. Figures are CPU seconds from the traced model and its plan to the module, and the process' largest size.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

MODEL = "llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256"
"""Llama-3 70B."""


def emit_rank(model: str, config: str, devices: int, rank: int) -> str:
    """In a process of its own: emit for a rank; a line of figures."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    from autopar.cluster import load_cluster
    from autopar.cost.roofline import RooflinePricer
    from autopar.emit.build import emit
    from autopar.formulate.config import ManualConfig
    from autopar.formulate.planner import Planner
    from autopar.plan import POLICIES, Request
    from autopar.trace import load_model
    from autopar.trace.capture import trace

    loaded = load_model(model, seq_len=4096)
    graph = trace(loaded.model, loaded.inputs, compute_dtype="bfloat16")
    cluster = load_cluster(f"{devices // 8}x8xh100-80gb")
    request = Request(model, cluster.name, "cpu", devices, devices, "bf16", POLICIES["bf16"], "adamw")
    record = Planner(graph, cluster, RooflinePricer(cluster), request).estimate(ManualConfig.parse(config))
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=devices)
    began = time.process_time()
    pm = emit(record, graph, loaded.model, device=torch.device("meta"))
    took_s, size = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"rank {rank:3d}: {took_s:6.2f} CPU s, {size:5.2f} GiB, {len(list(pm.parameters()))} parameters"


def main() -> None:
    """Print a line for each rank."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--config", default="tp=8,pp=8,microbatch_size=1")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--rank", type=int)
    asked = parser.parse_args()
    if asked.rank is not None:
        print(emit_rank(asked.model, asked.config, asked.devices, asked.rank))
        return
    print(f"{asked.model}, {asked.config}, {asked.devices} devices")
    same = [f"--model={asked.model}", f"--config={asked.config}", f"--devices={asked.devices}"]
    for rank in (*range(8), *range(asked.devices - 8, asked.devices)):
        command = [sys.executable, "-m", "benchmarks.emission", *same, f"--rank={rank}"]
        subprocess.run(command, check=True, timeout=300)


if __name__ == "__main__":
    main()
