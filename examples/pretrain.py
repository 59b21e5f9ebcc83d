"""Pretrain a GPT as with torchtitan: a plan, warm-up and decay, clipping, logs, checkpoints in the background, resume.

    torchrun --nproc-per-node 2 examples/pretrain.py --folder runs/gpt --steps 20
    torchrun --nproc-per-node 4 examples/pretrain.py --folder runs/gpt --steps 40    # goes on, under another plan

With `--plan FILE` (from `autopar plan -o`) that plan is run. Where a process becomes slow for good, the run changes to
a plan that gives it less to do. Under torchrun's `--max-restarts` a run whose process dies goes on from its last
checkpoint; if torchrun may also do with fewer machines, under a plan for those that are left:

    torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 \
        examples/pretrain.py --folder SHARED/gpt                                       # on each of two machines
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar

VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE = 256, 64, 4, 3, 32


class Block(nn.Module):
    """Causal attention, then two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        heads = (linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A language model; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Data:
    """Made-up text, drawn by the number of the step: where it is is all there is to keep of it."""

    def __init__(self, global_batch: int) -> None:
        self.global_batch, self.step = global_batch, 0

    def next(self, rows: range | None) -> dict[str, Tensor]:
        """These rows of the next global batch; none on an idle rank."""
        self.step += 1
        numbers = torch.Generator().manual_seed(self.step)
        starts = torch.randint(VOCABULARY, (self.global_batch, 1), generator=numbers)
        strides = torch.randint(1, 4, (self.global_batch, 1), generator=numbers)
        text = (starts + strides * torch.arange(SEQUENCE + 1)) % VOCABULARY
        return {} if rows is None else {"tokens": text[rows, :-1], "targets": text[rows, 1:]}

    def state_dict(self) -> dict[str, int]:
        """Where the data is."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.step = state["step"]


def main() -> None:
    """Plan, resume, train, log, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and traces")
    parser.add_argument("--plan", type=Path, help="a plan file; by default the best for these processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--decay-until", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--profile", type=int, default=0, help="step of which a trace is written")
    options = parser.parse_args()

    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT()
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    example = {"tokens": ids, "targets": ids.clone()}
    if options.plan:
        parallel = autopar.optimize(model, example, plan=autopar.Plan.load(options.plan))
    else:
        asked = {"cluster": "local", "global_batch": options.global_batch, "dtype": options.dtype}
        parallel = autopar.optimize(model, example, **asked)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(f"{os.environ.get('WORLD_SIZE', '1')} processes")
        print(autopar.Plan(parallel.record).explain())

    data = Data(parallel.record.request.global_batch)
    parameters = list(parallel.parameters()) or [nn.Parameter(torch.zeros(()))]  # an idle rank has none
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=options.warm_up)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.decay_until - options.warm_up)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [options.warm_up])
    checkpoints = autopar.Checkpoints(options.folder)
    done = checkpoints.load(parallel, optimizer, schedule=schedule, data=data) or 0
    elastic = autopar.Elastic(model, parallel, optimizer, steps=options.steps, folder=options.folder)
    if first and done:
        print(f"goes on after step {done}")

    began = time.perf_counter()
    for step in range(done + 1, options.steps + 1):
        with traced(options.folder, first and step == options.profile):
            loss = parallel.train_step(**data.next(parallel.data_parallel_rows()))
            norm = parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if first and step % options.log_every == 0:
            now = time.perf_counter()
            rate = options.log_every * data.global_batch * SEQUENCE / (now - began)
            began = now
            print(f"step {step}  loss {loss.item():.8f}  gradient {norm.item():.4f}  tokens/s {rate:.0f}", flush=True)
        if step % options.save_every == 0 or step == options.steps:
            checkpoints.save(step, parallel, optimizer, schedule=schedule, data=data, asynchronous=True)
        if elastic.step() and first:
            print(f"another plan from here on:\n{autopar.Plan(parallel.record).explain()}", flush=True)
    checkpoints.wait()


class traced:
    """Write a trace of what runs inside (chrome://tracing, ui.perfetto.dev); forward passes are named by layer."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self.file = folder / "trace.json"
        self.profiler = torch.profiler.profile() if wanted else None

    def __enter__(self) -> None:
        if self.profiler:
            self.profiler.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.profiler:
            self.profiler.__exit__(*error)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.file))


if __name__ == "__main__":
    main()
