"""Timing of collectives over the process groups of the running job, all groups of a shape at once."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from autopar.graph import CollectiveKey
from autopar.measure.ops import LEAST_REPEATS, MOST_REPEATS, clock_for
from autopar.measure.profile import Sample, Timing
from autopar.shard.collectives import relayout


def fits_job(key: CollectiveKey, world_size: int) -> bool:
    """Whether the job's ranks can be dealt out into groups of the key's shape."""
    return key.ranks > 1 and world_size % (key.ranks * key.stride) == 0


def group_members(rank: int, ranks: int, stride: int) -> tuple[int, ...]:
    """Ranks of the group that `rank` is in when a job is dealt out into groups of `ranks`, each `stride` apart."""
    first = rank // (ranks * stride) * (ranks * stride) + rank % stride
    return tuple(first + i * stride for i in range(ranks))


@cache
def _group_name(ranks: int, stride: int, world_size: int) -> str:
    """Name of this rank's group of that shape; every rank of the job makes all of them, in the same order."""
    mine = ""
    for members in dict.fromkeys(group_members(rank, ranks, stride) for rank in range(world_size)):
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = group.group_name
    return mine


def time_collective(key: CollectiveKey, device: torch.device, budget_s: float = 0.03) -> Timing:
    """Time a collective as emitted code runs it; every rank of the job calls this with the same key.

    The number of repeats is the first rank's. Raises nothing: what can't be run is returned as failed.
    """
    if not fits_job(key, dist.get_world_size()):
        return Timing(failed=f"groups of {key.ranks} ranks {key.stride} apart don't fit {dist.get_world_size()} ranks")
    try:
        return _timed(key, device, budget_s)
    except (RuntimeError, ValueError, KeyError) as error:
        return Timing(failed=f"{type(error).__name__}: {error}"[:500])


def _timed(key: CollectiveKey, device: torch.device, budget_s: float) -> Timing:
    group = _group_name(key.ranks, key.stride, dist.get_world_size())
    full = max(key.ranks, key.bytes // 4 // key.ranks * key.ranks)
    held = full // key.ranks if key.kind == "all_gather" else full
    buffer = torch.zeros(held, device=device)
    move = f"{key.kind} 0 0 {key.ranks} {group}"  # of `autopar::relayout`, on a flat buffer

    def once() -> float:
        dist.barrier()
        clock = clock_for(device)
        relayout(buffer, [move], [])
        return clock()

    once()
    repeats = torch.tensor([max(LEAST_REPEATS, min(MOST_REPEATS, int(budget_s / max(once(), 1e-6))))], device=device)
    dist.broadcast(repeats, 0)
    return Timing(Sample(tuple(once() for _ in range(int(repeats)))))
