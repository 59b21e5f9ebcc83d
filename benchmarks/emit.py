"""Emitted modules beside parallel code written by hand (`benchmarks/by_hand`), on this machine.

    python -m benchmarks.emit [--ranks 2] [--rounds 12]

Both sides train the same GPT with foreach AdamW in processes of one thread. Their steps alternate, each between two
barriers; figures are medians of wall seconds and of CPU seconds of all ranks, which another user of the machine
disturbs less, and peaks of tensor bytes on the fullest rank. Ratios are ours over theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import ranks

if TYPE_CHECKING:
    from benchmarks.by_hand.gpt import Dims
    from benchmarks.by_hand.side import Side

MICROBATCH = 2
COLUMNS = (("wall s", 9), ("CPU s", 9), ("MiB", 8))
PLANS = {
    "DistributedDataParallel": "dp={n},microbatch_size={rows}",
    "fully_shard": "dp={n},microbatch_size={rows},zero=3",
    "Megatron by collectives": "tp={n},microbatch_size={batch}",
    "parallelize_module": "tp={n},microbatch_size={batch}",
    "PipelineStage, 1F1B": f"pp={{n}},microbatch_size={MICROBATCH}",
}
"""What each is compared with: the plan that splits the model alike."""


@dataclass(frozen=True)
class Figures:
    """What one side takes: medians over steps, most over ranks, and the loss after the last step."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    loss: float


def by_hand(name: str, dims: Dims) -> Side:
    """The side written by hand."""
    from benchmarks.by_hand import data, dtensor, pipeline, tensor

    sides: dict[str, Callable[[], Side]] = {
        "DistributedDataParallel": lambda: data.replicated(dims),
        "fully_shard": lambda: data.sharded(dims),
        "Megatron by collectives": lambda: tensor.split(dims),
        "parallelize_module": lambda: dtensor.parallelized(dims),
        "PipelineStage, 1F1B": lambda: pipeline.staged(dims, MICROBATCH),
    }
    return sides[name]()


def emitted(name: str, dims: Dims) -> Side:
    """The emitted module of the plan that splits the model alike."""
    import torch
    import torch.distributed as dist

    from autopar.cluster import load_cluster
    from autopar.cost.roofline import RooflinePricer
    from autopar.emit.build import emit
    from autopar.formulate.config import ManualConfig
    from autopar.formulate.planner import Planner
    from autopar.plan import POLICIES, Request
    from autopar.trace.capture import trace
    from benchmarks.by_hand.gpt import build
    from benchmarks.by_hand.side import Side, rows

    count, model = dist.get_world_size(), build(dims)
    ids = torch.zeros(2, dims.tokens, dtype=torch.long)
    graph = trace(model, {"ids": ids, "labels": ids}, compute_dtype="float32")
    cluster = load_cluster(f"{count}xepyc-9654")
    request = Request(name, cluster.name, "cpu", count, dims.batch, "fp32", POLICIES["fp32"], "adamw")
    text = PLANS[name].format(n=count, rows=dims.batch // count, batch=dims.batch)
    record = Planner(graph, cluster, RooflinePricer(cluster), request).estimate(ManualConfig.parse(text))
    pm = emit(record, graph, model, device="cpu")
    ids, labels = rows(dims, pm.data_parallel_rank or 0, pm.data_parallel_size)
    return Side(list(pm.parameters()), lambda: pm.train_step(ids=ids, labels=labels))


def measure() -> None:
    """On each rank: all comparisons, one after the other."""
    import torch
    import torch.distributed as dist

    from benchmarks.by_hand.gpt import Dims

    asked = json.loads(os.environ["AUTOPAR_BENCHMARK_ASKED"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dims = Dims(**asked["dims"])
    found = {}
    for name in asked["names"]:
        pair = compare(name, dims, asked["rounds"])
        found[name] = [asdict(figures) for figures in pair]
        print(line(name, *pair), file=sys.stderr, flush=True) if dist.get_rank() == 0 else None
    ranks.answer(found)
    dist.destroy_process_group()


def compare(name: str, dims: Dims, rounds: int) -> list[Figures]:
    """Ours, then theirs."""
    import torch
    import torch.distributed as dist

    from autopar.emit.peak import live_tensor_bytes, measured_peak_tensor_bytes

    steps: list[Callable[[], float]] = []
    peaks = []
    for make in (emitted, by_hand):
        held = live_tensor_bytes("cpu")
        step = stepping(make(name, dims))
        step()
        peak = torch.tensor(measured_peak_tensor_bytes(step, "cpu") - held)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks.append(int(peak))
        steps.append(step)
    taken: list[list[tuple[float, float, float]]] = [[], []]
    for k in range(rounds):
        for side in (0, 1) if k % 2 else (1, 0):
            taken[side].append(timed(steps[side]))
    last = torch.tensor([side[-1][2] for side in taken])
    dist.all_reduce(last)  # of data-parallel code every rank has its own rows' mean
    means = (last / dist.get_world_size()).tolist()
    return [
        Figures(median(t[0] for t in side), median(t[1] for t in side), *rest)
        for side, *rest in zip(taken, peaks, means, strict=True)
    ]


def stepping(side: Side) -> Callable[[], float]:
    """A training step; gradients stay until the next begins, so that buckets that outlive it are seen."""
    import torch
    from torch.distributed.tensor import DTensor

    kinds = {kind: [p for p in side.parameters if isinstance(p, DTensor) == kind] for kind in (True, False)}
    groups = [{"params": found} for found in kinds.values() if found]  # foreach takes no lists of both
    optimizer = torch.optim.AdamW(groups, lr=1e-4, foreach=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = side.loss()
        optimizer.step()
        return float(loss)

    return step


def timed(step: Callable[[], float]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds of all ranks, and the loss."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    loss = step()
    dist.barrier()
    wall_s, cpu_s = time.perf_counter() - began, torch.tensor(time.process_time() - worked)
    dist.all_reduce(cpu_s)
    return wall_s, float(cpu_s), loss


def main() -> None:
    """Print the table."""
    from benchmarks.by_hand.gpt import Dims

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=PLANS, action="append")
    parser.add_argument("--dims", default="", help="as in layers=4,width=256")
    asked = parser.parse_args()
    given = {k: int(v) for k, v in (pair.split("=") for pair in asked.dims.split(",") if pair)}
    dims = Dims(**given)
    wanted = {"names": asked.only or list(PLANS), "rounds": asked.rounds, "dims": given}
    os.environ["AUTOPAR_BENCHMARK_ASKED"] = json.dumps(wanted)
    found = ranks.launch("benchmarks.emit", asked.ranks)
    print(f"{dims}, fp32, {asked.ranks} processes")
    heads = "".join(f"{what:>{width}s}{'theirs':>{width}s}  ratio" for what, width in COLUMNS)
    print(f"{'compared with':25s}{heads}{'losses differ':>15s}")
    for name, pair in found.items():
        print(line(name, *(Figures(**figures) for figures in pair)))


def line(name: str, ours: Figures, theirs: Figures) -> str:
    """A row of the table."""
    pairs: list[tuple[Any, Any, str]] = [
        (ours.wall_s, theirs.wall_s, "9.4f"),
        (ours.cpu_s, theirs.cpu_s, "9.4f"),
        (ours.peak_bytes / 2**20, theirs.peak_bytes / 2**20, "8.1f"),
    ]
    cells = "".join(f"{a:{form}}{b:{form}}{a / b:7.3f}" for a, b, form in pairs)
    return f"{name:25s}{cells}{abs(ours.loss - theirs.loss):15.1e}"


if __name__ == "__main__":
    measure() if ranks.inside() else main()
