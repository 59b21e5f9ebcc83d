"""Fine-tune a Transformers model as with Accelerate: loaders, schedule, clipping, evaluation, checkpoints.

    torchrun --nproc-per-node 2 examples/finetune_hf.py --output runs/tiny

Without torchrun the same script trains on one device. `--model DIR` takes a configuration and, where there are any,
the weights (safetensors) of that folder; without it a tiny Llama with weights of its own is trained.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

import autopar

SEQUENCE, GLOBAL_BATCH = 32, 8


def configuration(folder: Path | None) -> LlamaConfig:
    """That of the folder, or a tiny one."""
    if folder is not None:
        return AutoConfig.from_pretrained(folder)
    return LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQUENCE,
    )  # fmt: skip


class Text(torch.utils.data.Dataset):
    """Made-up sequences that count up, so that there is something to learn."""

    def __init__(self, count: int, vocabulary: int) -> None:
        self.starts = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (self.starts[index] + torch.arange(SEQUENCE)) % self.vocabulary
        return {"input_ids": ids, "labels": ids}


def batches(data: Text, model: nn.Module, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of every global batch; a last one that isn't full is left out. Idle ranks get none."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = model.data_parallel_rows(GLOBAL_BATCH)
    for first in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
        chosen = [data[i] for i in order[first : first + GLOBAL_BATCH]]
        own = chosen[rows.start : rows.stop] if rows is not None else []
        yield {key: torch.stack([one[key] for one in own]) for key in chosen[0]} if own else {}


def main() -> None:
    """Plan, load, train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a configuration, and weights if there are any")
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args()
    config = configuration(options.model)
    torch.manual_seed(0)
    with torch.device("meta" if options.model else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids.clone()}
    parallel = autopar.optimize(model, example, cluster="local", global_batch=GLOBAL_BATCH, dtype="fp32")
    if options.model and any(options.model.glob("*.safetensors")):
        autopar.load_safetensors(parallel, options.model)
    train, held_out = Text(64, config.vocab_size), Text(8, config.vocab_size)
    parameters = list(parallel.parameters()) or [nn.Parameter(torch.zeros(()))]  # an idle rank has none
    optimizer = torch.optim.AdamW(parameters, lr=options.lr)
    total = options.epochs * (len(train) // GLOBAL_BATCH)
    schedule = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    checkpoints = autopar.Checkpoints(options.output)
    done = checkpoints.load(parallel, optimizer, schedule=schedule) or 0
    step = 0
    for epoch in range(options.epochs):
        for batch in batches(train, parallel, epoch):
            step += 1
            if step <= done:
                continue  # trained on before the run was interrupted
            loss = parallel.train_step(**batch)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        parallel.eval()
        losses = [parallel.eval_step(**batch).item() for batch in batches(held_out, parallel, 0)]
        parallel.train()
        if step > done:
            checkpoints.save(step, parallel, optimizer, schedule=schedule)
        if os.environ.get("RANK", "0") == "0" and step > done:
            print(f"epoch {epoch}  step {step}  loss {loss.item():.6f}  held out {sum(losses) / len(losses):.6f}")


if __name__ == "__main__":
    main()
