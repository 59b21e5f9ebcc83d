"""Plan a small GPT, train it on 4 local processes, and hold what was predicted against what was measured.

    make demo                   (or: python examples/demo.py)

The text is Python's own language reference, as it ships with CPython; the model is a transformers configuration.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pydoc_data.topics import topics
from statistics import median
from typing import Any

RANKS, STEPS, GLOBAL_BATCH, TOKENS, LEARNING_RATE = 4, 20, 16, 128, 1e-3
TEXT = "".join(topics.values()).encode()
TOLERANCE = 1e-3
"""Largest difference of losses in fp32, where both runs round differently for 20 steps."""


def main() -> int:
    """Start the ranks; the exit code is torchrun's."""
    if "RANK" in os.environ:
        return work()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=environment, check=False).returncode


def make_model() -> Any:
    """A GPT-2 over bytes, without dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": TOKENS, "n_embd": 256, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def batch_of(step: int) -> dict[str, Any]:
    """The global batch of a step: random stretches of the text."""
    import torch

    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - TOKENS, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[s : s + TOKENS] for s in starts.tolist()])
    return {"input_ids": rows, "labels": rows.clone()}


def work() -> int:
    """What each rank does: plan together, train in parallel; rank 0 then trains alone and compares."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.emit.peak import measured_peak_tensor_bytes

    torch.set_num_threads(1)
    model = make_model()
    plan = autopar.plan(
        model, batch_of(0), cluster="local", global_batch=GLOBAL_BATCH, dtype="fp32", name="GPT-2 (4 layers, bytes)"
    )
    parallel = autopar.optimize(model, batch_of(0), plan)
    del model
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)

    def step(number: int) -> float:
        rows = GLOBAL_BATCH // parallel.data_parallel_size
        mine = slice(parallel.data_parallel_rank * rows, (parallel.data_parallel_rank + 1) * rows)
        loss = parallel.train_step(**{name: t[mine] for name, t in batch_of(number).items()})
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    losses, seconds = [], []
    for number in range(STEPS):
        began = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - began)
    peak = torch.tensor(measured_peak_tensor_bytes(lambda: step(STEPS), "cpu"))
    dist.all_reduce(peak, dist.ReduceOp.MAX)  # of the fullest rank, as predicted
    if dist.get_rank() != 0:
        dist.barrier()
        dist.destroy_process_group()
        return 0
    alone = train_alone(make_model())
    difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(plan.explain(), "\n")
    print_table(plan, median(seconds[2:]), int(peak), losses[-1], alone[-1], difference)
    wrong = f"losses differ by {difference:.2g}, more than {TOLERANCE}" if difference > TOLERANCE else ""
    print(f"demo: {wrong or 'ok'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


def train_alone(model: Any) -> list[float]:
    """Losses of the plain model on one process."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for number in range(STEPS):
        loss = model(**batch_of(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def print_table(plan: Any, step_s: float, peak_bytes: int, loss: float, alone: float, difference: float) -> None:
    """Predicted beside measured."""
    from autopar.report.strategy import strategy_words

    stage = plan.stages[0]
    middle = stage.strategies[stage.assignment[len(stage.assignment) // 2]]
    mib = 1 << 20
    stages = f"{len(plan.stages)} stages ({plan.schedule}), each " if plan.pp_degree > 1 else ""
    words = strategy_words(middle, stage.mesh)
    print(f"{'plan chosen':26s}{stages}{words}; {plan.num_microbatches} microbatches")
    print(f"{'':26s}{'predicted':>14s}{'measured':>14s}")
    print(f"{'seconds a step':26s}{plan.step_time_s:14.3f}{step_s:14.3f}")
    print(f"{'peak tensor MiB':26s}{plan.peak_tensor_bytes / mib:14.1f}{peak_bytes / mib:14.1f}")
    print(f"{'':26s}{'parallel':>14s}{'one process':>14s}")
    print(f"{f'loss after {STEPS} steps':26s}{loss:14.6f}{alone:14.6f}")
    print(f"{'largest loss difference':26s}{difference:14.2e}")


if __name__ == "__main__":
    sys.exit(main())
