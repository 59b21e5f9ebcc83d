"""Simulated pipeline schedules against closed forms and a plain event simulation."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cells import refusal
from autopar.cost.schedule import ORDERS, Holding, Shape, holdings, in_flight, simulate


def _uniform(shape: Shape) -> tuple[float, float]:
    """Step time and bubble with stages of 1 second forward and 2 backward, nothing else."""
    n = shape.stages
    found = simulate(shape, [1.0] * n, [2.0] * n, [0.0] * (n - 1), [0.0] * n)
    return found.step_time_s, found.bubble_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("groups", "count"), [(1, 1), (2, 1), (4, 2), (4, 4), (4, 7), (8, 64), (5, 13)])
def test_bubble_of_equal_stages(schedule: str, groups: int, count: int) -> None:
    """The bubble is (p - 1) / m of the work, for few and for many microbatches."""
    step, bubble = _uniform(Shape(schedule, groups, 1, count))
    assert bubble / (3.0 * count) == pytest.approx((groups - 1) / count, abs=1e-12)
    assert step == 3.0 * (count + groups - 1)


@pytest.mark.parametrize(
    ("groups", "chunks", "count"), [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 4, 16), (8, 3, 8), (3, 2, 9)]
)
def test_bubble_of_interleaved_stages(groups: int, chunks: int, count: int) -> None:
    """With v chunks a device the bubble is (p - 1) / (v m) of the work."""
    _, bubble = _uniform(Shape("interleaved", groups, chunks, count))
    assert bubble / (3.0 * count * chunks) == pytest.approx((groups - 1) / (chunks * count), abs=1e-12)


@given(st.integers(1, 9), st.integers(1, 20))
def test_microbatches_in_flight(groups: int, count: int) -> None:
    """Stage i holds min(p - i, m) microbatches under 1f1b, all of them under gpipe."""
    assert in_flight(Shape("1f1b", groups, 1, count)) == tuple(min(groups - i, count) for i in range(groups))
    assert in_flight(Shape("gpipe", groups, 1, count)) == (count,) * groups


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_in_flight(groups: int, chunks: int, rounds: int) -> None:
    """A device holds one more than the forwards it runs ahead, p (v - 1) + 2 (p - 1 - rank), all chunks together."""
    shape = Shape("interleaved", groups, chunks, rounds * groups)
    for group in range(groups):
        held, most = 0, 0
        for work in ORDERS["interleaved"](shape, group):
            held += -1 if work.backward else 1
            most = max(most, held)
        ahead = groups * (chunks - 1) + 2 * (groups - 1 - group) + 1
        assert most == min(ahead, chunks * shape.num_microbatches)
        assert sum(in_flight(shape)[group::groups]) >= most


def _plainly(
    shape: Shape, forward: list[float], backward: list[float], sent: list[float]
) -> dict[tuple[int, int, bool], float]:
    """End of every pass: devices take turns, each doing its next pass once its input is known."""
    queues = [list(ORDERS[shape.schedule](shape, g)) for g in range(shape.groups)]
    free = [0.0] * shape.groups
    done: dict[tuple[int, int, bool], float] = {}
    last = shape.stages - 1
    while any(queues):
        moved = False
        for g, queue in enumerate(queues):
            while queue:
                s, k, back = queue[0]
                if back:
                    key, delay = ((s, k, False), 0.0) if s == last else ((s + 1, k, True), sent[s] if s < last else 0.0)
                else:
                    key, delay = (s - 1, k, False), sent[s - 1] if s else 0.0
                if key not in done and (back or s):
                    break
                arrived = done[key] + delay if back or s else 0.0
                free[g] = max(free[g], arrived) + (backward if back else forward)[s]
                done[s, k, back] = free[g]
                queue.pop(0)
                moved = True
        assert moved, "deadlock"
    return done


@given(st.data())
def test_against_a_plain_simulation(data: st.DataObject) -> None:
    """Uneven stages and slow links: every pass ends when a device-by-device simulation says."""
    schedule = data.draw(st.sampled_from(sorted(ORDERS)))
    groups = data.draw(st.integers(1, 5))
    chunks = data.draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    count = data.draw(st.integers(1, 9))
    shape = Shape(schedule, groups, chunks, count)
    if refusal(schedule, set(), set(), shape.stages, count, groups):
        count = groups * data.draw(st.integers(1, 3))
        shape = Shape(schedule, groups, chunks, count)
    seconds = st.floats(0.0, 5.0)
    forward, backward, once = (
        data.draw(st.lists(seconds, min_size=shape.stages, max_size=shape.stages)) for _ in range(3)
    )
    sent = data.draw(st.lists(seconds, min_size=shape.stages - 1, max_size=shape.stages - 1))
    found = simulate(shape, forward, backward, sent, once)
    wanted = _plainly(shape, forward, backward, sent)
    assert len(found.timeline) == len(wanted)
    for event in found.timeline:
        assert event.end_s == pytest.approx(wanted[event.stage, event.microbatch, event.kind == "backward"], abs=1e-9)
    ends = [max(e for (s, _, _), e in wanted.items() if s % groups == g) + sum(once[g::groups]) for g in range(groups)]
    assert found.step_time_s == pytest.approx(max(ends), abs=1e-9)


def test_large_schedules_are_quick() -> None:
    """64 stages and 512 microbatches, once laid out, take well under a tenth of a second."""
    shape = Shape("1f1b", 64, 1, 512)
    _uniform(shape)
    began = process_time()
    step, _ = _uniform(shape)
    assert step == 3.0 * (512 + 63)
    assert process_time() - began < 0.1


def test_states_in_backward_passes() -> None:
    """GPipe holds all microbatches and no gradients, then one less and gradients; 1F1B both where there are enough."""
    first, later = Holding(0, (4,), (False,)), Holding(0, (3,), (True,))
    assert holdings(Shape("gpipe", 2, 1, 4), 0) == (first, later)
    assert holdings(Shape("1f1b", 2, 1, 4), 0) == (Holding(0, (2,), (True,)),)
    assert holdings(Shape("1f1b", 4, 1, 4), 0) == (first, later)


@pytest.mark.parametrize(
    "shape", [Shape("interleaved", 2, 2, 8), Shape("interleaved", 4, 3, 8), Shape("1f1b", 3, 1, 7)]
)
def test_some_state_covers_every_moment(shape: Shape) -> None:
    """Replaying a device's order, what is held at each backward pass is covered by a state that is reached."""
    for group in range(shape.groups):
        states = holdings(shape, group)
        done: set[tuple[int, int, bool]] = set()
        seen = []
        for work in ORDERS[shape.schedule](shape, group):
            chunk = work.stage // shape.groups
            if work.backward:
                counts = [
                    sum((c, k, False) in done and (c, k, True) not in done for k in range(shape.num_microbatches))
                    for c in range(shape.chunks)
                ]
                grown = [any((c, k, True) in done for k in range(shape.num_microbatches)) for c in range(shape.chunks)]
                seen.append(Holding(chunk, tuple(counts), tuple(grown)))
            done.add((chunk, work.microbatch, work.backward))
        assert set(states) <= set(seen)
        assert all(any(covers(state, now) for state in states) for now in seen)


def covers(state: Holding, other: Holding) -> bool:
    """Whether at least as much is held in a state as in another one of the same chunk."""
    pairs = zip(state.saved + state.grown, other.saved + other.grown, strict=True)
    return state.chunk == other.chunk and all(a >= b for a, b in pairs)
