"""Simulated pipeline schedules against closed forms and a plain event simulation."""

from __future__ import annotations

from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.arrivals import arrivals
from autopar.cost.orders import Kind, Shape, Work, works
from autopar.cost.schedule import Holding, fullest, holdings, in_flight, keeps_sent, simulate, turns, weights_behind
from tests.cost.test_orders import shapes


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
        for work in works(shape, group):
            held += 1 if work.kind == Kind.FORWARD else -1
            most = max(most, held)
        ahead = groups * (chunks - 1) + 2 * (groups - 1 - group) + 1
        assert most == min(ahead, chunks * shape.num_microbatches)
        assert sum(in_flight(shape)[group::groups]) >= most


Ends = dict[tuple[int, int, Kind], float]


def _plainly(shape: Shape, seconds: dict[Kind, list[float]], sent: list[float]) -> Ends:
    """End of every pass: devices take turns, each doing its next pass (or joint passes) once all inputs are known."""
    queues = [works(shape, g) for g in range(shape.groups)]
    free = [0.0] * shape.groups
    done: Ends = {}
    known: dict[tuple[int, int, bool], float] = {}
    while any(queues):
        moved = False
        for g, queue in enumerate(queues):
            while queue:
                now = queue[:2] if queue[0].kind == Kind.JOINT else queue[:1]
                arrivals = [_arrival(shape, work, known, sent) for work in now]
                if any(a is None for a in arrivals):
                    break
                free[g] = max(free[g], *(a for a in arrivals if a is not None))
                for work in now:
                    free[g] += seconds[work.kind][work.stage]
                    done[work] = free[g]
                for work in now:
                    if work.kind != Kind.WEIGHT:
                        known[work.stage, work.microbatch, not work.kind.is_forward] = free[g]
                del queue[: len(now)]
                moved = True
        assert moved, "deadlock"
    return done


def _arrival(shape: Shape, work: Work, known: dict[tuple[int, int, bool], float], sent: list[float]) -> float | None:
    """When a pass's input is there; None while that isn't known."""
    stage, microbatch, kind = work
    if kind == Kind.WEIGHT or (kind.is_forward and stage == 0):
        return 0.0
    if kind.is_forward:
        found, delay = known.get((stage - 1, microbatch, False)), sent[stage - 1]
    elif stage == shape.stages - 1:
        found, delay = known.get((stage, microbatch, False)), 0.0
    else:
        found, delay = known.get((stage + 1, microbatch, True)), sent[stage]
    return None if found is None else found + delay


@given(shapes(), st.data())
def test_against_a_plain_simulation(shape: Shape, data: st.DataObject) -> None:
    """Uneven stages and slow links: every pass ends when a device-by-device simulation says."""
    drawn = st.lists(st.floats(0.0, 5.0), min_size=shape.stages, max_size=shape.stages)
    forward, given_back, weights, once, sent = (data.draw(drawn) for _ in range(5))
    backward = [i + w for i, w in zip(given_back, weights, strict=True)]
    found = simulate(shape, forward, backward, sent[1:], once, weights)
    seconds = {Kind.FORWARD: forward, Kind.JOINT: forward, Kind.BACKWARD: backward, Kind.INPUT: given_back,
               Kind.WEIGHT: weights}  # fmt: skip
    wanted = _plainly(shape, seconds, sent[1:])
    assert len(found.timeline) == len(wanted)
    for event in found.timeline:
        assert event.end_s == pytest.approx(wanted[event.stage, event.microbatch, event.kind], abs=1e-9)
    ends = [
        max(e for (s, _, _), e in wanted.items() if shape.group_of(s) == g) + sum(once[s] for s in shape.stages_of(g))
        for g in range(shape.groups)
    ]
    assert found.ends_s.tolist() == pytest.approx(ends, abs=1e-9)
    assert found.step_time_s == pytest.approx(max(ends), abs=1e-9)


@pytest.mark.parametrize("shape", [Shape("1f1b", 64, 1, 512), Shape("zbv", 32, 2, 512)], ids=lambda s: s.schedule)
def test_large_schedules_are_quick(shape: Shape) -> None:
    """64 stages and 512 microbatches, once laid out, take some milliseconds (2 to 4 on the machine it was written on),
    and no less than the work of a group and the way through all stages."""
    taken = []
    for _ in range(6):
        began = process_time()
        step, _ = _uniform(shape)
        taken.append(process_time() - began)
    work, way = 3.0 * 512 * shape.chunks, 63.0
    assert work + way <= step <= work + 3 * way
    assert min(taken) < 0.015


def test_states_in_backward_passes() -> None:
    """GPipe holds all microbatches and no gradients, then one less and gradients; 1F1B both where there are enough."""
    first, later = Holding(0, (4,), (False,)), Holding(0, (3,), (True,))
    assert holdings(Shape("gpipe", 2, 1, 4), 0) == (first, later)
    assert holdings(Shape("1f1b", 2, 1, 4), 0) == (Holding(0, (2,), (True,)),)
    assert holdings(Shape("1f1b", 4, 1, 4), 0) == (first, later)


@pytest.mark.parametrize(
    "shape",
    [Shape("interleaved", 2, 2, 8), Shape("interleaved", 4, 3, 8), Shape("1f1b", 3, 1, 7), Shape("zb", 3, 1, 6),
     Shape("zbv", 3, 2, 7), Shape("dualpipev", 3, 2, 8)],
)  # fmt: skip
def test_some_state_covers_every_moment(shape: Shape) -> None:
    """Replaying a device's order, what is held at each backward pass is covered by a state that is reached."""
    for group in range(shape.groups):
        states, mine, sends = holdings(shape, group), shape.stages_of(group), arrivals(shape, group)
        done: set[tuple[int, int, str]] = set()
        seen = []

        def count(stage: int, has: str, lacks: str, done: set[tuple[int, int, str]] = done) -> int:
            numbers = range(shape.num_microbatches)
            return sum((stage, k, has) in done and (stage, k, lacks) not in done for k in numbers)

        own = works(shape, group)
        for n, (stage, microbatch, kind) in enumerate(own):
            half = {Kind.BACKWARD: 0, Kind.INPUT: 1, Kind.WEIGHT: 2}.get(kind)
            if half is not None:
                saved = tuple(count(s, "forward", "back") for s in mine)
                grown = tuple(any((s, k, "weights") in done for k in range(shape.num_microbatches)) for s in mine)
                begun = tuple(any((s, k, "back") in done for k in range(shape.num_microbatches)) for s in mine)
                others = done | {(stage, microbatch, "weights")}
                put_off = tuple(count(s, "back", "weights", others) for s in mine)
                if half < 2 or not grown[mine.index(stage)]:  # else less is held than in the first half before it
                    kept = [
                        own[m].stage for m, until, back in zip(*map(list, sends), strict=True) if back and m < n < until
                    ]
                    sent = tuple(kept.count(s) for s in mine) if keeps_sent(shape) else ()
                    seen.append(Holding(mine.index(stage), saved, grown, half, put_off, begun, sent))
            names = {Kind.BACKWARD: ("back", "weights"), Kind.INPUT: ("back",), Kind.WEIGHT: ("weights",)}
            done |= {(stage, microbatch, name) for name in names.get(kind, ("forward",))}
        split = any(state.put_off for state in states)
        seen = seen if split else [state._replace(put_off=(), begun=()) for state in seen]
        assert set(states) <= set(seen)
        assert all(any(covers(state, now) for state in states) for now in seen)


def covers(state: Holding, other: Holding) -> bool:
    """Whether at least as much is held in a state as in another one of the same chunk."""
    pairs = zip(_amounts(state), _amounts(other), strict=True)
    return (state.chunk, state.half) == (other.chunk, other.half) and all(a >= b for a, b in pairs)


def _amounts(state: Holding) -> tuple[int, ...]:
    """A gradient that was sent is no more than what was saved of another microbatch."""
    either = [saved + sent for saved, sent in zip(state.saved, state.sent or state.saved, strict=True)]
    return (*state.saved, *either, *state.grown, *state.put_off, *state.begun)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("groups", [2, 3, 5])
def test_what_v_shapes_hold_settles(schedule: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What groups of V-shaped schedules hold is counted of few microbatches: it is that of all of them."""
    shape = Shape(schedule, groups, 2, 5 * groups)
    known = [set(holdings.__wrapped__(shape, g)) for g in range(groups)]
    flying, behind = in_flight.__wrapped__(shape), weights_behind.__wrapped__(shape)
    ahead = turns.__wrapped__(shape).ahead
    monkeypatch.setattr("autopar.cost.schedule._short", lambda of: of)
    assert [set(holdings.__wrapped__(shape, g)) for g in range(groups)] == known
    assert (in_flight.__wrapped__(shape), weights_behind.__wrapped__(shape)) == (flying, behind)
    assert np.array_equal(turns.__wrapped__(shape).ahead, ahead)


@given(shapes())
def test_fullest_states_are_those_held(shape: Shape) -> None:
    """What a group holds at most beside all gradients is the largest of its states in which all exist."""
    for group in range(shape.groups):
        own = [h.saved for h in holdings(shape, group) if shape.num_microbatches == 1 or all(h.grown)]
        found = tuple(fullest(shape)[s] for s in shape.stages_of(group))
        assert sum(found) == max(map(sum, own), default=0)
        assert found in own or not own
