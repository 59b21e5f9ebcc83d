"""The pool of rank processes itself."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.pool import Pool, RankError


def _sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_world_size(), total


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"told to fail on {rank}")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _process() -> int:
    return os.getpid()


def _gather_over(ways: int) -> None:
    mesh = init_device_mesh("cpu", (2, ways))
    whole = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]).full_tensor()
    assert whole.sum() == 16


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("world_size", [4, 2, 1, 8])
def test_results_by_rank(pool: Pool, world_size: int) -> None:
    """Every rank takes part in a collective, whatever the world size of the task before was."""
    expected = sum(range(world_size)) + 10 * world_size
    assert pool.run(world_size, _sum_of_ranks, 10) == [(world_size, torch.tensor([expected]))] * world_size


def test_processes_are_reused(pool: Pool) -> None:
    """Two tasks run in the same processes."""
    assert pool.run(2, _process) == pool.run(2, _process)


def test_groups_of_a_task_are_gone_after_it(pool: Pool) -> None:
    """Meshes whose redistributions DTensor remembers keep no group, each of which has threads."""
    before = pool.run(4, _threads)
    for _ in range(3):
        pool.run(4, _gather_over, 2)
    assert pool.run(4, _threads) == before


def test_hundreds_of_tasks_fit_in_a_minute(pool: Pool) -> None:
    """A task of four ranks costs less than 0.2 s of wall time, process group included."""
    pool.run(4, _process)
    start = time.monotonic()
    for _ in range(10):
        pool.run(4, _sum_of_ranks, 0)
    assert time.monotonic() - start < 2.0


def test_the_failing_rank_speaks_first(pool: Pool) -> None:
    """When one rank fails and the others hang for it, its own error comes first and the next task runs."""
    with pytest.raises(RankError, match=r"^rank 1 of 3 failed:\nTraceback[\s\S]*ValueError: told to fail on 1"):
        pool.run(3, _fail_on, 1)
    assert len(pool.run(3, _sum_of_ranks, 0)) == 3


def test_a_dead_rank_is_named(pool: Pool) -> None:
    """A rank that dies without a word is reported with its exit code and the next task runs."""
    with pytest.raises(RankError, match="rank 1 of 2 failed:\nthe process died with exit code 7"):
        pool.run(2, _die_on, 1)
    assert len(pool.run(2, _sum_of_ranks, 0)) == 2


def test_a_hung_rank_is_ended(pool: Pool) -> None:
    """After the timeout the error shows where the rank hung, and the next task runs."""
    with pytest.raises(RankError, match=r"rank 0 of 2 had not finished after 1 s; it was at:\n[\s\S]*_hang_on"):
        pool.run(2, _hang_on, 0, timeout_s=1.0)
    assert len(pool.run(2, _sum_of_ranks, 0)) == 2
