"""Timing of collectives over the process groups of the running job, all groups of a shape at once."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.accelerator import is_host
from autopar.graph import CollectiveKey
from autopar.measure.hiding import COVERED, HIDDEN
from autopar.measure.ops import LEAST_REPEATS, MOST_REPEATS, clock_for
from autopar.measure.overlap import time_both
from autopar.measure.profile import Sample, Timing
from autopar.shard.collectives import relayout
from autopar.shard.torch_private import group_named

BUSY_SIZE, BUSY_PRODUCTS = 256, 3


def fits_job(key: CollectiveKey, world_size: int) -> bool:
    """Whether the job's ranks can be dealt out into groups of the key's shape."""
    return key.ranks > 1 and world_size % (key.ranks * key.stride) == 0


def group_members(rank: int, ranks: int, stride: int) -> tuple[int, ...]:
    """Ranks of the group that `rank` is in when a job is dealt out into groups of `ranks`, each `stride` apart."""
    first = rank // (ranks * stride) * (ranks * stride) + rank % stride
    return tuple(first + i * stride for i in range(ranks))


_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], str]] = WeakKeyDictionary()
"""Names of this rank's groups by ranks and stride, for as long as the job's own group lives."""


def _group_name(ranks: int, stride: int) -> str:
    """Name of this rank's group of that shape; every rank of the job makes all of them, in the same order."""
    job = dist.group.WORLD
    if job is None:
        raise RuntimeError("collectives are timed in a job: its process group has not been made")
    known = _groups.setdefault(job, {})
    if (ranks, stride) not in known:
        for members in dict.fromkeys(group_members(rank, ranks, stride) for rank in range(dist.get_world_size())):
            group = dist.new_group(list(members))
            if dist.get_rank() in members:
                known[ranks, stride] = group.group_name
    return known[ranks, stride]


def time_collective(key: CollectiveKey, device: torch.device, budget_s: float = 0.05) -> Timing:
    """Time a collective as emitted code runs it; every rank of the job calls this with the same key.

    Each run comes after a little computation, as in a training step: threads that move data have been asleep.
    The number of repeats is the first rank's. Raises nothing: what can't be run is returned as failed.
    """
    if not fits_job(key, dist.get_world_size()):
        return Timing(failed=f"groups of {key.ranks} ranks {key.stride} apart don't fit {dist.get_world_size()} ranks")
    try:
        return _timed(key, device, budget_s)
    except (RuntimeError, ValueError, KeyError) as error:
        return Timing(failed=f"{type(error).__name__}: {error}"[:500])


def _timed(key: CollectiveKey, device: torch.device, budget_s: float) -> Timing:
    group = _group_name(key.ranks, key.stride)
    buffer = _on_all(lambda: torch.zeros(_held_elements(key), device=device), device)
    if key.kind in (HIDDEN, COVERED):
        return time_both(key, group, buffer)
    run = _runner(key, group, buffer)

    def once() -> float:
        dist.barrier()
        _compute(device)
        clock = clock_for(device)
        run()
        return clock()

    once()
    repeats = torch.tensor([max(LEAST_REPEATS, min(MOST_REPEATS, int(budget_s / max(once(), 1e-6))))], device=device)
    dist.broadcast(repeats, 0)
    return Timing(Sample(tuple(once() for _ in range(int(repeats)))))


def _held_elements(key: CollectiveKey) -> int:
    full = max(key.ranks, key.bytes // 4 // key.ranks * key.ranks)
    return full // key.ranks if key.kind == "all_gather" else full


def _on_all(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """What `make` makes; where it can't on some rank, RuntimeError on all, which else would wait for that one."""
    made: torch.Tensor | None = None
    why = "another rank ran out of memory"
    try:
        made = make()
    except RuntimeError as error:
        why = str(error)
    failed = torch.tensor(float(made is None), device=device)
    dist.all_reduce(failed)
    if made is None or failed:
        raise RuntimeError(why)
    return made


def _compute(device: torch.device) -> None:
    """About a millisecond of work on the host; a device's queue needs none."""
    if is_host(device):
        factor = torch.ones(BUSY_SIZE, BUSY_SIZE, device=device)
        for _ in range(BUSY_PRODUCTS):
            factor = factor @ factor


def _runner(key: CollectiveKey, group: str, buffer: torch.Tensor) -> Callable[[], object]:
    """What runs the collective once: `autopar::relayout` on a flat buffer, or a broadcast from the group's first."""
    if key.kind == "broadcast":
        members = group_named(group)
        return lambda: dist.broadcast(buffer, group=members, group_src=0)
    move = f"{key.kind} 0 0 {key.ranks} {group}"
    return lambda: relayout(buffer, [move], [])
