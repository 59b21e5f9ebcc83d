"""A pipeline in time: what its stages send each other, and what all of it comes to on a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.orders import Shape
from autopar.cost.schedule import Simulation, simulate
from autopar.formulate.pipelines.ground import Ground
from autopar.formulate.record.predict import Prediction
from autopar.plan import Between


class Passes(NamedTuple):
    """Seconds of a stage: forward and backward in a microbatch, once a step, and of backward for weights apart."""

    forward_s: float
    backward_s: float
    step_s: float
    weight_s: float


@dataclass(frozen=True, eq=False)
class PipedTime:
    """A step of a pipeline. `cut_s` (cuts,): seconds of sending a microbatch from each stage to the next.

    `exposed_s`: seconds by which that prolongs the step. `shared_s` (groups,): seconds once a step of summing what
    several groups hold.
    """

    simulation: Simulation
    cut_s: tuple[float, ...]
    exposed_s: float
    shared_s: tuple[float, ...]


def run(shape: Shape, stages: Sequence[Passes], between: Between, ground: Ground) -> PipedTime:
    """Simulate a step of stages that take so long."""
    cut_s = _cut_s(shape, between, ground)
    shared_s = _shared_s(shape, between, ground)
    forward, backward, step, weights = zip(*stages, strict=True)
    step = tuple(s + (shared_s[i] if i < shape.groups else 0.0) for i, s in enumerate(step))
    found = simulate(shape, forward, backward, cut_s, step, weights)
    at_once = simulate(shape, forward, backward, [0.0] * len(cut_s), step, weights)
    return PipedTime(found, cut_s, max(0.0, found.step_time_s - at_once.step_time_s), shared_s)


def add_up(alone: Sequence[Prediction], time: PipedTime) -> Prediction:
    """What the groups come to together, from what the layers of each come to.

    Seconds are those of the group that works longest, and its bubble; bytes those of the group that holds most.
    """
    busiest, step_s = time.simulation.busiest, time.simulation.step_time_s
    kinds = dict(alone[busiest].by_kind_s)
    kinds["communication"] = kinds.get("communication", 0.0) + time.exposed_s + time.shared_s[busiest]
    kinds["bubble"] = max(0.0, step_s - sum(kinds.values()))
    sources: dict[str, float] = defaultdict(float)
    for found in alone:
        for source, seconds in found.by_source_s.items():
            sources[source] += seconds
    fullest = max((found.memory for found in alone), key=lambda memory: sum(memory.values()))
    return Prediction(step_s, kinds, dict(sources), fullest)


def _cut_s(shape: Shape, between: Between, ground: Ground) -> tuple[float, ...]:
    """Seconds of sending to the next stage; none where it is on the same devices."""
    ends = [(shape.group_of(i), shape.group_of(i + 1)) for i in range(len(between.cut_bytes))]
    return tuple(
        ground.seconds("broadcast", size, pair) if pair[0] != pair[1] else 0.0
        for size, pair in zip(between.cut_bytes, ends, strict=True)
    )


def _shared_s(shape: Shape, between: Between, ground: Ground) -> tuple[float, ...]:
    seconds: dict[int, float] = defaultdict(float)
    for size, groups in zip(between.shared_bytes, between.shared_by, strict=True):
        taken = ground.seconds("all_reduce", size, groups)
        for group in groups:
            seconds[group] += taken
    return tuple(seconds[g] for g in range(shape.groups))
