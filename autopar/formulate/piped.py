"""A pipeline in time: what its stages send each other, and what all of it comes to on a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.orders import Shape
from autopar.cost.pricer import Pricer
from autopar.cost.schedule import Simulation, simulate
from autopar.formulate.predict import Prediction
from autopar.graph import CollectiveKey
from autopar.plan import Between


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


def run(
    shape: Shape, passes_s: Sequence[tuple[float, float, float]], between: Between, group_size: int, pricer: Pricer
) -> PipedTime:
    """Simulate a step. `passes_s`: of each stage seconds forward, backward (a microbatch) and once a step."""
    cut_s = _cut_s(shape, between, group_size, pricer)
    shared_s = _shared_s(shape, between, group_size, pricer)
    forward, backward, step = ([p[i] for p in passes_s] for i in range(3))
    step = [s + (shared_s[i] if i < shape.groups else 0.0) for i, s in enumerate(step)]
    found = simulate(shape, forward, backward, cut_s, step)
    at_once = simulate(shape, forward, backward, [0.0] * len(cut_s), step)
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


def _cut_s(shape: Shape, between: Between, group_size: int, pricer: Pricer) -> tuple[float, ...]:
    node, groups = pricer.cluster.devices_per_node, shape.groups
    keys = [
        CollectiveKey("broadcast", size, 2, _distance(i % groups, (i + 1) % groups, group_size, node))
        for i, size in enumerate(between.cut_bytes)
    ]
    return tuple(pricer.collectives(keys).seconds.tolist())


def _shared_s(shape: Shape, between: Between, group_size: int, pricer: Pricer) -> tuple[float, ...]:
    seconds: dict[int, float] = defaultdict(float)
    for size, groups in zip(between.shared_bytes, between.shared_by, strict=True):
        apart = _distance(min(groups), max(groups), group_size, pricer.cluster.devices_per_node)
        taken = float(pricer.collectives([CollectiveKey("all_reduce", size, len(groups), apart)]).seconds[0])
        for group in groups:
            seconds[group] += taken
    return tuple(seconds[g] for g in range(shape.groups))


def _distance(one: int, other: int, size: int, node: int) -> int:
    """Distance in ranks of two groups of `size`, at least a node where a node's end lies between them."""
    apart = abs(one - other) * size
    return apart if one * size // node == other * size // node else max(apart, node)
