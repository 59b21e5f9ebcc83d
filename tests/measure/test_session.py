from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.measure.collectives import group_members
from autopar.measure.profile import Timing
from autopar.measure.session import measuring, serve
from tests.pool import Pool

PRODUCT = OpKey("aten.mm.default", (Operand((32, 32), "float32", True), Operand((32, 32), "float32", True)))
COLLECTIVES = [
    CollectiveKey(kind, 4096, ranks, stride)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for ranks, stride in ((2, 1), (2, 2), (4, 1))
]


def together() -> tuple[int, dict[OpKey, Timing], dict[CollectiveKey, Timing]]:
    device = torch.device("cpu")
    if dist.get_rank() != 0:
        serve(device)
        return (0, {}, {})
    with measuring(device) as session:
        return session.environment.busy_ranks, session.ops([PRODUCT]), session.collectives(COLLECTIVES)


def fails_while_measuring() -> str:
    device = torch.device("cpu")
    if dist.get_rank() != 0:
        serve(device)
        return "released"
    try:
        with measuring(device) as session:
            session.ops([PRODUCT])
            raise ZeroDivisionError
    except ZeroDivisionError:
        return "released"


def test_all_ranks_time_the_same_keys(pool: Pool) -> None:
    """Four ranks: the timings of all are joined on the first, for ops and every collective and shape of group."""
    busy, ops, collectives = pool.run(4, together)[0]
    assert busy == 4
    assert len(ops[PRODUCT].forward.raw_s) >= 4 * 3
    assert list(collectives) == COLLECTIVES
    assert [t.failed for t in collectives.values()] == [""] * len(COLLECTIVES)
    assert all(t.forward_s > 0 for t in collectives.values())


def test_ranks_are_released_when_planning_fails(pool: Pool) -> None:
    """An error on rank 0 while it measures leaves no rank waiting."""
    assert pool.run(2, fails_while_measuring) == ["released"] * 2


def test_groups_of_a_shape() -> None:
    """Eight ranks in groups of two, four apart: 0 and 4, ..., 3 and 7; in groups of four, two apart: evens and odds."""
    assert [group_members(r, 2, 4) for r in (0, 3, 7)] == [(0, 4), (3, 7), (3, 7)]
    assert [group_members(r, 4, 2) for r in (0, 1, 6)] == [(0, 2, 4, 6), (1, 3, 5, 7), (0, 2, 4, 6)]
