"""Paths through a pipeline's passes against the simulated step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cells import refusal
from autopar.cost.orders import Shape
from autopar.cost.schedule import simulate
from autopar.engine.stack_problem import Floats
from autopar.formulate.pipelines.book import Chunk, Ranges
from autopar.formulate.pipelines.paths import Ints, LeastPasses, group_paths, left_out
from autopar.schedules import SPLIT

CHUNKS = {"gpipe": 1, "1f1b": 1, "zb": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}


Seconds = list[float]


def _longest(shape: Shape, forward: Seconds, backward: Seconds, weight: Seconds, step_s: Seconds) -> float:
    """The longest path of all groups, by stages of one unit each whose passes take so long."""
    split = shape.schedule in SPLIT
    once_s = np.array(step_s)
    put_off = [w if split else 0.0 for w in weight]
    inputs = [b - w for b, w in zip(backward, put_off, strict=True)]
    least = LeastPasses(*(np.cumsum([0.0, *each]) for each in (forward, backward, inputs)))
    spans = np.cumsum([0.0, *(f + i for f, i in zip(forward, inputs, strict=True))])
    stages = np.array([shape.stages_of(g) for g in range(shape.groups)])
    passes = shape.num_microbatches * (np.array(forward) + np.array(backward))[stages].sum(axis=1)
    each = [least.of(stages[:, c], stages[:, c] + 1) for c in range(shape.chunks)]

    def work(once: bool, ahead: Ints, late: Ints) -> Floats:
        return left_out(shape.num_microbatches, passes + once * once_s, each, ahead, late)

    paths = group_paths(shape, least, stages, stages + 1, work)
    return float(max(paths.alone.max(), (spans[stages[:, 0]] + paths.behind).max()))


SECONDS = st.lists(st.floats(0.1, 9.0), min_size=8, max_size=8)


@given(st.sampled_from(sorted(CHUNKS)), st.integers(2, 4), st.integers(1, 12), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_no_path_is_longer_than_the_step(
    schedule: str, groups: int, count: int, forward: list[float], backward: list[float], share: float
) -> None:
    """Whatever the passes of the stages take, a simulated step is no shorter than any of its paths."""
    shape = Shape(schedule, groups, CHUNKS[schedule], count)
    if refusal(schedule, set(), set(), shape.stages, count, groups):
        return
    forward, backward = forward[: shape.stages], backward[: shape.stages]
    weight, once = [share * b for b in backward], forward[:groups]
    step_s = [once[s] if s < groups else 0.0 for s in range(shape.stages)]
    found = simulate(shape, forward, backward, [0.0] * (shape.stages - 1), step_s, weight)
    assert _longest(shape, forward, backward, weight, once) <= found.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "least"), [("gpipe", 1.0), ("1f1b", 1.0), ("interleaved", 1.0), ("zbv", 0.97)])
def test_even_stages_reach_a_path(schedule: str, least: float) -> None:
    """Equal stages take no longer than the longest path; ZB-V with unequal passes hardly longer."""
    shape = Shape(schedule, 4, CHUNKS[schedule], 16)
    forward, backward, weight = [1.0] * shape.stages, [2.1] * shape.stages, [0.8] * shape.stages
    found = simulate(shape, forward, backward, [0.0] * (shape.stages - 1), [0.0] * shape.stages, weight)
    assert _longest(shape, forward, backward, weight, [0.0] * 4) >= least * found.step_time_s * (1 - 1e-9)


def test_few_in_flight_are_charged_for_no_more() -> None:
    """Where a price is known with 4 microbatches in flight alone, a range with fewer costs no more than it would; what
    is illegal stays so, none in flight or not."""
    units = np.arange(2)
    free = np.where(units[:, None] < units, 10.0, np.inf)  # seconds, with 2 + 4 bytes for each microbatch in flight
    least = LeastPasses(*(np.array([0.0, 1.0]),) * 3)
    at_four = free + 0.5 * (2 + 4 * 4)
    ranges = Ranges(1, free, least, {0.0: {1: free}, 0.5: {4: at_four}}, {1: np.zeros_like(free)}, 10)
    for most in (0, 1, 2, 4, 7):
        true = max(10.0, 10.0 + 0.5 * (2 + 4 * most) - 0.5 * 10)
        assert 10.0 <= ranges.joint_load([Chunk(0, 1)], [most]) <= true + 1e-12
        assert ranges.joint_load([Chunk(1, 1)], [most]) == np.inf
    assert ranges.joint_load([Chunk(0, 1)], [4]) == 10.0 + 0.5 * 18 - 0.5 * 10  # exact where the price is known
