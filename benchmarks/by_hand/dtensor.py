"""Tensor parallelism by DTensor's dispatch: `parallelize_module` with loss parallelism."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.by_hand.gpt import Dims, build, cross_entropy
from benchmarks.by_hand.side import Side, rows


def parallelized(dims: Dims) -> Side:
    """Columns, rows, vocabulary: as `tensor.split` does it."""
    model, mesh = build(dims), init_device_mesh("cpu", (dist.get_world_size(),))
    whole: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    inner: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    inner |= {name: RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh, whole)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    ids, labels = rows(dims, 0, 1)

    def loss() -> Tensor:
        with loss_parallel():
            mean = cross_entropy(model.logits(ids), labels)
            mean.backward()
        return mean.detach().full_tensor()  # type: ignore[attr-defined, no-any-return]

    return Side(list(model.parameters()), loss)
