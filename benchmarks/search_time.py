"""CPU seconds and memory of planning large models offline: trace to plan, one process each.

python -m benchmarks.search_time
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

LLAMA_70B = "llama:layers={layers},hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=32000"
LLAMA_8B = "llama:layers={layers},hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"
GPT_1T = "gpt:layers=128,hidden=25600,heads=160,vocab=51200"


class Case(NamedTuple):
    """What to plan; `below_s`: the search seconds asked for, as many times those of case `than` if that is given."""

    name: str
    spec: str
    seq_len: int
    cluster: str
    batch: int
    below_s: float
    than: str = ""


CASES = (
    Case("7B, 8 A100 of 40 GB", "llama-7b", 2048, "8xa100-40gb", 64, 1),
    Case("7B, 64 A100 of 40 GB", "llama-7b", 2048, "8x8xa100-40gb", 512, 3),
    Case("70B, 1024 H100", LLAMA_70B.format(layers=80), 4096, "128x8xh100-80gb", 1024, 5),
    Case("1T, 3072 A100", GPT_1T, 2048, "384x8xa100-80gb", 1536, 10),
    Case("8B, 256 H100", LLAMA_8B.format(layers=32), 8192, "32x8xh100-80gb", 512, 10),
    Case("70B, 128 A100", LLAMA_70B.format(layers=80), 4096, "16x8xa100-80gb", 512, 5),
    Case("the same, half as deep", LLAMA_70B.format(layers=40), 4096, "16x8xa100-80gb", 512, 1 / 1.2, "70B, 128 A100"),
    Case("7B, 32 A100 of 40 GB", "llama-7b", 2048, "4x8xa100-40gb", 64, 1.7, "7B, 8 A100 of 40 GB"),
    Case("7B, 8 A100 of 80 GB", "llama-7b", 2048, "8xa100-80gb", 64, 1.1, "7B, 8 A100 of 40 GB"),
    Case("8B of 4 layers, 256 H100", LLAMA_8B.format(layers=4), 8192, "32x8xh100-80gb", 512, 1 / 1.3, "8B, 256 H100"),
)
"""Growth: twice the layers at most 1.2 times as long, four times the devices 1.7, twice the memory 1.1."""
LAYER = "llama:layers=1,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000"
MESHES = (((32, 8), 3.0), ((8, 8, 4), 10.0))


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
        "rss_bytes": _peak_bytes(),
    }


def one_layer(sizes: tuple[int, ...]) -> dict[str, float]:
    """CPU seconds and memory of a Llama layer laid out, priced and solved over a mesh, for all boundary layouts."""
    from autopar.cluster import load_cluster
    from autopar.cost.roofline import RooflinePricer
    from autopar.formulate.chains.columns import Budget
    from autopar.formulate.chains.known import Known
    from autopar.formulate.chains.siblings import WHOLE
    from autopar.formulate.chains.strategies import Chains
    from autopar.formulate.layers.tables import Setting
    from autopar.formulate.mesh import mesh_of
    from autopar.formulate.pins import Pins
    from autopar.plan import POLICIES
    from autopar.trace import load_model, trace

    loaded = load_model(LAYER, seq_len=4096)
    graph = trace(loaded.model, loaded.inputs, compute_dtype="bfloat16")
    pricer = RooflinePricer(load_cluster("32x8xh100-80gb"))
    began = time.process_time()
    known = Known(pricer)
    runs = known.runs(graph, [Pins()] * len(graph.layers))
    budget = Budget(None, POLICIES["bf16"], "adamw")
    Chains(runs, Setting(mesh_of(sizes), 256, 1), pricer, budget, known).bound(WHOLE)
    return {"cpu_s": time.process_time() - began, "rss_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run(argument: object) -> dict[str, Any]:
    """What one process of its own found."""
    command = [sys.executable, "-m", "benchmarks.search_time", json.dumps(argument)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> None:
    """Print one line a case."""
    print(f"{'case':26s}{'trace s':>9s}{'search s':>10s}{'asked':>8s}{'all s':>8s}{'GiB':>7s}{'step s':>9s}{'gap':>7s}")
    searched: dict[str, float] = {}
    for case in CASES:
        found = _run([case.spec, case.seq_len, case.cluster, case.batch])
        searched[case.name] = found["search_s"]
        below_s = case.below_s * searched.get(case.than, 1.0)
        print(
            f"{case.name:26s}{found['trace_s']:9.2f}{found['search_s']:10.2f}{below_s:8.2f}{found['cpu_s']:8.2f}"
            f"{found['rss_bytes'] / 2**30:7.2f}{found['step_time_s']:9.3f}{found['gap']:7.1%}",
            flush=True,
        )
    for sizes, below_s in MESHES:
        found = _run(sizes)
        name = f"a layer on {'x'.join(map(str, sizes))}"
        print(f"{name:35s}{found['cpu_s']:10.2f}{below_s:8.2f}{'':8s}{found['rss_bytes'] / 2**30:7.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given = json.loads(sys.argv[1])
        print(json.dumps(measure(*given) if isinstance(given[0], str) else one_layer(tuple(given))))
    else:
        main()
