"""Data parallelism: DistributedDataParallel, and `fully_shard` block by block."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.by_hand.gpt import Dims, build
from benchmarks.by_hand.side import Side, rows


def replicated(dims: Dims) -> Side:
    """Gradients are views of DDP's buckets, which are reduced while the backward pass runs."""
    return _side(DistributedDataParallel(build(dims), gradient_as_bucket_view=True), dims)


def sharded(dims: Dims) -> Side:
    """Each block gathered for its forward and again for its backward pass; the rest belongs to the root."""
    model = build(dims)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _side(model, dims)


def _side(model: nn.Module, dims: Dims) -> Side:
    ids, labels = rows(dims, dist.get_rank(), dist.get_world_size())

    def loss() -> Tensor:
        mean: Tensor = model(ids, labels)
        mean.backward()
        return mean.detach()

    return Side(list(model.parameters()), loss)
