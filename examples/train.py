"""Train a small model on all processes of a job, split as autopar finds best.

    torchrun --nproc-per-node 4 examples/train.py

Without torchrun the same script trains on one device.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional

import autopar

WIDTH, CLASSES, GLOBAL_BATCH, STEPS = 64, 10, 256, 20


class Block(nn.Module):
    """A residual block with a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gate = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """A classifier; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.blocks(x)), labels)


def batch_of(step: int, rows: range | None, device: torch.device) -> dict[str, torch.Tensor]:
    """These rows of a made-up global batch; none on a rank that the plan leaves idle."""
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, WIDTH, generator=numbers)
    labels = (x[:, :CLASSES]).argmax(dim=1)
    return {} if rows is None else {"x": x[rows].to(device), "labels": labels[rows].to(device)}


def main() -> None:
    """Plan, train, print the loss."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)
    example = {"x": torch.zeros(8, WIDTH), "labels": torch.zeros(8, dtype=torch.long)}
    model = autopar.optimize(Net(), example, cluster="local", global_batch=GLOBAL_BATCH, dtype="fp32")
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(()))]  # an idle rank has none
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(STEPS):
        loss = model.train_step(**batch_of(step, model.data_parallel_rows(), device))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step:2d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
