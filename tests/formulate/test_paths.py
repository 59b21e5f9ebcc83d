"""Paths through a pipeline's passes against the simulated step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cells import refusal
from autopar.cost.orders import Shape
from autopar.cost.schedule import simulate
from autopar.engine.stack_problem import Floats
from autopar.formulate.pipelines.paths import LeastPasses, Work, group_paths, left_out
from autopar.schedules import SPLIT

CHUNKS = {"gpipe": 1, "1f1b": 1, "zb": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}


def _longest(
    shape: Shape, forward: list[float], backward: list[float], weight: list[float], once: list[float]
) -> float:
    """The longest path of all groups, by stages of one unit each whose passes take so long."""
    split = shape.schedule in SPLIT
    late = [w if split else 0.0 for w in weight]
    inputs = [b - w for b, w in zip(backward, late, strict=True)]
    least = LeastPasses(*(np.cumsum([0.0, *each]) for each in (forward, backward, inputs)))
    spans = np.cumsum([0.0, *(f + i for f, i in zip(forward, inputs, strict=True))])
    found = []
    for group in range(shape.groups):
        stages = shape.stages_of(group)
        work = _work(shape, least, stages, sum(forward[s] + backward[s] for s in stages), once[group])
        paths = group_paths(shape, group, least, list(stages), [s + 1 for s in stages], work)
        found += [paths.alone, spans[stages[0]] + paths.behind]
    return float(max(found))


def _work(shape: Shape, least: LeastPasses, stages: Sequence[int], micro_s: float, once_s: float) -> Work:
    each = [tuple(np.diff(up_to)[s] for up_to in least) for s in stages]

    def work(once: bool, ahead: Sequence[int], late: Sequence[int]) -> Floats:
        count = shape.num_microbatches
        return left_out(count, count * micro_s + once * once_s, each, ahead, late)

    return work


SECONDS = st.lists(st.floats(0.1, 9.0), min_size=8, max_size=8)


@settings(deadline=None)
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
