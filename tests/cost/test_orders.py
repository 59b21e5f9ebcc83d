"""The order in which devices work, against torch's own schedules and the closed forms of the schedules' papers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.cells import misfit
from autopar.cost.orders import Kind, Shape, Work, works
from autopar.cost.schedule import in_flight, simulate
from autopar.schedules import SPLIT, V_SHAPED

CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT, "W": Kind.WEIGHT}


class Recorder:
    """A stage that notes what it is told to run, and otherwise does nothing."""

    has_backward = True

    def __init__(self, index: int) -> None:
        self.stage_index = index
        self.found: list[Work] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.found.append(Work(self.stage_index, microbatch, Kind.FORWARD))

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.found.append(Work(self.stage_index, microbatch, Kind.BACKWARD))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []


def torchs_order(shape: Shape, group: int) -> list[Work]:
    """What torch's class has a group do; it is not started as a whole, which takes processes."""
    schedule = CLASSES[shape.schedule].__new__(CLASSES[shape.schedule])
    schedule._n_microbatches, schedule.pp_group_size, schedule.rank = shape.num_microbatches, shape.groups, group
    if shape.schedule in ("gpipe", "1f1b"):
        schedule._stage, schedule._num_stages, schedule.scale_grads = Recorder(group), shape.groups, False
        schedule._has_backward = True
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(schedule, name, lambda *_: None)
        given: list[object] = [()] * shape.num_microbatches
        schedule._check_inputs = lambda *_: (given, given)
        schedule._step_microbatches()
        found: list[Work] = schedule._stage.found
        return found
    schedule.n_local_stages, schedule.num_stages = shape.chunks, shape.stages
    schedule.number_of_rounds = max(1, shape.num_microbatches // shape.groups)
    schedule.microbatches_per_round = shape.num_microbatches // schedule.number_of_rounds
    found = []
    for action in filter(None, schedule._calculate_single_rank_operations(group)):
        parts = action.sub_actions or (action,)
        for part in parts:
            kind = Kind.JOINT if len(parts) > 1 and part is parts[0] else KINDS[part.computation_type.value]
            found.append(Work(part.stage_index, part.microbatch_index, kind))
    return found


@st.composite
def shapes(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(CLASSES)) -> Shape:
    """Pipelines that can be run."""
    schedule, groups = draw(st.sampled_from(schedules)), draw(st.integers(2, 7))
    chunks = 2 if schedule in V_SHAPED else draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    chunks = draw(st.integers(1, 3)) if schedule == "zb" else chunks
    count = draw(st.integers(1, 20))
    while misfit(schedule, groups * chunks, groups, count):
        count += 1
    return Shape(schedule, groups, chunks, count)


@given(shapes())
def test_order_is_torchs(shape: Shape) -> None:
    """Every group does what torch's schedule has it do, in that order."""
    for group in range(shape.groups):
        assert works(shape, group) == torchs_order(shape, group)


@given(shapes())
def test_everything_is_done_once(shape: Shape) -> None:
    """Every stage runs every microbatch forward and backward; gradients of weights follow those of inputs."""
    for group in range(shape.groups):
        place: dict[tuple[int, int], list[Kind]] = {}
        for work in works(shape, group):
            kind = Kind.FORWARD if work.kind.is_forward else work.kind
            place.setdefault((work.stage, work.microbatch), []).append(kind)
        assert place.keys() == {(s, k) for s in shape.stages_of(group) for k in range(shape.num_microbatches)}
        whole, split = [Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.INPUT, Kind.WEIGHT]
        assert all(passes in (whole, split) for passes in place.values())
        assert shape.schedule in SPLIT or all(passes == whole for passes in place.values())


def bubble_s(shape: Shape, forward: float, given_back: float, weights: float) -> float:
    """Seconds that the busiest group idles where all stages are equal."""
    n, whole = shape.stages, given_back + weights
    return simulate(shape, [forward] * n, [whole] * n, [0.0] * (n - 1), [0.0] * n, [weights] * n).bubble_s


@given(st.integers(2, 12), st.integers(0, 20), st.floats(0.0, 1.0))
def test_bubble_of_zero_bubble_h1(groups: int, more: int, weights: float) -> None:
    """(p - 1)(F + B - 2 W), B being both halves, as long as W is no longer than either (Qi et al., 2023)."""
    shape = Shape("zb", groups, 1, groups * (1 + more))
    assert bubble_s(shape, 1.0, 1.0, weights) == pytest.approx((groups - 1) * (1.0 + 1.0 - weights), abs=1e-9)


@given(st.integers(2, 6), st.integers(0, 9))
def test_no_bubble_in_zero_bubble_v(groups: int, more: int) -> None:
    """Where all passes take as long, no group idles between its first one and its last (Qi et al., section 6)."""
    shape = Shape("zbv", groups, 2, 2 * groups + more)
    n = shape.stages
    found = simulate(shape, [1.0] * n, [2.0] * n, [0.0] * (n - 1), [0.0] * n, [1.0] * n)
    begun = {shape.group_of(e.stage): e.start_s for e in reversed(found.timeline)}
    for group, begins in begun.items():
        assert begins == group
        assert found.ends_s[group] - begins == found.busy_s[group] == 6.0 * shape.num_microbatches


@given(st.integers(2, 9), st.integers(0, 20), st.floats(0.0, 1.0))
def test_bubble_of_dual_pipe_v(groups: int, more: int, weights: float) -> None:
    """(PP/2 - 1)(F&B + B - 3 W) with PP = 2 p stages and F&B = F + B, as nothing overlaps (DeepSeek-AI, DualPipe)."""
    shape, backward = Shape("dualpipev", groups, 2, 2 * groups + more), 1.0 + weights
    found = bubble_s(shape, 1.0, 1.0, weights)
    assert found == pytest.approx((groups - 1) * (1.0 + backward + backward - 3 * weights), abs=1e-9)


@given(st.integers(2, 6), st.integers(0, 5))
def test_microbatches_that_split_schedules_hold(groups: int, more: int) -> None:
    """p at every stage under ZB-H1; in halves on every device 2 p under ZB-V and 2 p + 1 under DualPipeV."""
    count = 2 * groups + more
    assert in_flight(Shape("zb", groups, 1, groups * (1 + more))) == (groups,) * groups
    assert most_held(Shape("zbv", groups, 2, count)) == [2 * groups] * groups
    assert most_held(Shape("dualpipev", groups, 2, count)) == [2 * groups + 1] * groups


def most_held(shape: Shape) -> list[int]:
    """For each group, of how many microbatches its chunks together hold activations at most."""
    found = []
    for group in range(shape.groups):
        held, most = 0, 0
        for work in works(shape, group):
            held += 1 if work.kind.is_forward else 0 if work.kind == Kind.INPUT else -1
            most = max(most, held)
        found.append(most)
    return found
