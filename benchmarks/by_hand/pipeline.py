"""1F1B over two stages or more: `PipelineStage` and `Schedule1F1B`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.by_hand.gpt import GPT, Dims, build, cross_entropy
from benchmarks.by_hand.side import Side, rows


class Part(nn.Module):
    """The blocks of one stage, with the embedding in front on the first and the head behind on the last."""

    def __init__(self, model: GPT, number: int, count: int) -> None:
        super().__init__()
        each = -(-len(model.blocks) // count)
        self.blocks = nn.ModuleList(model.blocks[number * each : (number + 1) * each])
        self.embedding, self.positions = (model.embedding, model.positions) if number == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if number == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """What comes from the stage before, or ids, to what goes to the next, or logits."""
        if self.embedding is not None:
            x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def staged(dims: Dims, microbatch: int) -> Side:
    """Each rank a stage; the loss on the last is sent to all."""
    rank, count, microbatches = dist.get_rank(), dist.get_world_size(), dims.batch // microbatch
    part = Part(build(dims), rank, count)
    stage = PipelineStage(part, rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=cross_entropy)
    ids, labels = rows(dims, 0, 1)

    def loss() -> Tensor:
        losses: list[Tensor] = []
        given = (ids,) if rank == 0 else ()
        schedule.step(*given, target=labels if rank == count - 1 else None, losses=losses, return_outputs=False)
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.broadcast(mean, count - 1)
        return mean

    return Side(list(part.parameters()), loss)
