"""Collectives over many tensors at once: flattened into buckets, so that few large messages are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.emit.storage import chunk
from autopar.emit.torch_private import copy_all
from autopar.shard.storage import BUCKET_BYTES

# torch 2.13 renamed both; the old names warn.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors of one dtype that go together, in order."""
    bucket: list[int] = []
    filled = 0
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        for i, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                continue
            if bucket and filled + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += tensor.nbytes
        yield bucket
        bucket, filled = [], 0


def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each tensor over the group, in place."""
    for bucket in _buckets(tensors):
        members = [tensors[i] for i in bucket]
        if len(members) == 1 and members[0].is_contiguous():
            dist.all_reduce(members[0], group=group)
            continue
        flat = torch.cat([t.reshape(-1) for t in members])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [t.numel() for t in members])
        copy_all(members, [p.view(t.shape) for p, t in zip(parts, members, strict=True)])


def reduce_scatter(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """This rank's rows (dim 0 dealt over the group as by `storage.chunk`) of the sum of each tensor over the group.

    Takes the tensors out of the list as it goes, so that they need not exist beside what is made of them.
    """
    ways, index = group.size(), group.rank()
    shapes = [chunk(t, 0, ways, index).shape for t in tensors]
    shares = [_share(t, ways) for t in tensors]
    found: dict[int, Tensor] = {}
    for bucket in list(_buckets(tensors)):
        whole = torch.cat([_dealt(tensors[i], ways) for i in bucket], dim=1)
        for i in bucket:
            tensors[i] = whole.new_empty(0)
        mine = whole.new_empty(whole.shape[1])
        _REDUCE_SCATTER(mine, whole.view(-1), group=group)
        for i, piece in zip(bucket, torch.split(mine, [shares[i] for i in bucket]), strict=True):
            found[i] = piece[: shapes[i].numel()].view(shapes[i])
    return [found[i] for i in range(len(tensors))]


def all_gather(pieces: Sequence[Tensor], wholes: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill each of `wholes` with the rows its ranks hold (`pieces`: this rank's): the inverse of dealing dim 0."""
    ways = group.size()
    for bucket in _buckets(wholes):
        shares = [_share(wholes[i], ways) for i in bucket]
        mine = wholes[bucket[0]].new_zeros(sum(shares))
        for place, i in zip(torch.split(mine, shares), bucket, strict=True):
            place[: pieces[i].numel()].copy_(pieces[i].reshape(-1))
        gathered = mine.new_empty(ways, len(mine))
        _ALL_GATHER(gathered.view(-1), mine, group=group)
        for place, i in zip(torch.split(gathered, shares, dim=1), bucket, strict=True):
            wholes[i].copy_(place.reshape(-1)[: wholes[i].numel()].view(wholes[i].shape))


def _share(tensor: Tensor, ways: int) -> int:
    """Elements of the largest share of `tensor` when its rows are dealt over `ways` ranks."""
    return -(-tensor.shape[0] // ways) * tensor[:1].numel()


def _dealt(tensor: Tensor, ways: int) -> Tensor:
    """`tensor` (rows, ...) as (ways, share): the rows of each rank, the last ones filled up with zeros."""
    missing = ways * _share(tensor, ways) - tensor.numel()
    flat = tensor.reshape(-1)
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(ways, -1)
