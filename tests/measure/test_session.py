from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from autopar.errors import TraceError
from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.measure import collectives
from autopar.measure.collectives import group_members
from autopar.measure.profile import Timing
from autopar.measure.session import environment_of, measuring
from autopar.ranks import on_rank_0
from tests.pool import Pool

PRODUCT = OpKey("aten.mm.default", (Operand((32, 32), "float32", True), Operand((32, 32), "float32", True)))
COLLECTIVES = [
    CollectiveKey(kind, 4096, ranks, stride)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for ranks, stride in ((2, 1), (2, 2), (4, 1))
]


CPU = torch.device("cpu")


def timed() -> tuple[int, dict[OpKey, Timing], dict[CollectiveKey, Timing]]:
    with measuring(CPU) as session:
        return session.environment.busy_ranks, session.ops([PRODUCT]), session.collectives(COLLECTIVES)


def together() -> tuple[int, dict[OpKey, Timing], dict[CollectiveKey, Timing]]:
    return on_rank_0(timed)


def short_of_memory() -> list[bool]:
    """On a rank: whether a collective failed for which rank 1 has no memory, and then one for which it has."""
    taken = collectives._held_elements

    def none_left(key: CollectiveKey) -> int:
        if dist.get_rank() == 1 and key.kind == "all_gather":
            raise RuntimeError("out of memory")
        return taken(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_held_elements", none_left)
        keys = [CollectiveKey(kind, 4096, 4, 1) for kind in ("all_gather", "all_reduce")]
        return [bool(collectives.time_collective(key, CPU).failed) for key in keys]


def test_a_rank_without_memory_keeps_step(pool: Pool) -> None:
    """What one rank can't run fails on all of them, and they go on to the next together."""
    assert pool.run(4, short_of_memory) == [[True, False]] * 4


class Unsendable(Exception):
    """An error that can't be rebuilt from its text."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail(error: str, measure: bool) -> None:
    if measure:
        with measuring(CPU) as session:
            session.ops([PRODUCT])
            fail(error, False)
    if error == "unsendable":
        raise Unsendable(1, 2)
    raise {"trace": TraceError, "zero": ZeroDivisionError, "interrupt": KeyboardInterrupt}[error]("said by rank 0")


def seen(error: str, measure: bool) -> tuple[str, str]:
    """What a rank sees of a failure on rank 0; afterwards ranks still understand each other."""
    try:
        on_rank_0(lambda: fail(error, measure))
    except BaseException as found:
        text = str(found)
        return type(found).__name__, on_rank_0(lambda: text)
    return "nothing", ""


def without_asking() -> str:
    return on_rank_0(lambda: f"planned by {dist.get_rank()}")


def unsendable_result() -> str:
    try:
        on_rank_0(lambda: lambda: None)
    except Exception as found:
        return type(found).__name__
    return "nothing"


def test_all_ranks_time_the_same_keys(pool: Pool) -> None:
    """Four ranks: the timings of all are joined on the first, for ops and every collective and shape of group."""
    busy, ops, collectives = pool.run(4, together)[0]
    assert busy == 4
    assert len(ops[PRODUCT].forward.raw_s) >= 4 * 3
    assert list(collectives) == COLLECTIVES
    assert [t.failed for t in collectives.values()] == [""] * len(COLLECTIVES)
    assert all(t.forward_s > 0 for t in collectives.values())


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        ("trace", ["TraceError"] * 2),
        ("zero", ["ZeroDivisionError"] * 2),
        ("interrupt", ["KeyboardInterrupt"] * 2),
        ("unsendable", ["Unsendable", "RuntimeError"]),
    ],
)
def test_failures_of_rank_0_reach_all(pool: Pool, error: str, kinds: list[str], measure: bool) -> None:
    """Whatever rank 0 raises, before it measures or while it does, is raised on every rank: none is left waiting."""
    found = pool.run(2, seen, error, measure, timeout_s=30)
    assert [kind for kind, _ in found] == kinds
    assert found[0][1] == found[1][1]


def test_planning_without_timing(pool: Pool) -> None:
    """Rank 0 may be done without having timed anything (a profile was given), or with what can't be sent."""
    assert pool.run(3, without_asking) == ["planned by 0"] * 3
    assert len(set(pool.run(2, unsendable_result))) == 1


def test_nodes_keep_timings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks on two nodes are another environment than eight on one: their groups take other links."""
    alone = environment_of(CPU, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert environment_of(CPU, 8) == replace(alone, nodes=2)


def test_groups_of_a_shape() -> None:
    """Eight ranks in groups of two, four apart: 0 and 4, ..., 3 and 7; in groups of four, two apart: evens and odds."""
    assert [group_members(r, 2, 4) for r in (0, 3, 7)] == [(0, 4), (3, 7), (3, 7)]
    assert [group_members(r, 4, 2) for r in (0, 1, 6)] == [(0, 2, 4, 6), (1, 3, 5, 7), (0, 2, 4, 6)]
