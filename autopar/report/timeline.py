"""A step of a plan in time, as a Chrome trace that Perfetto (ui.perfetto.dev) shows.

A stage is a process in the trace, with a lane for what its devices compute and one for the communication that nothing
hides. All devices of a stage do the same at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cost.orders import Kind, Shape
from autopar.cost.schedule import simulate
from autopar.errors import PlanError
from autopar.files import write_atomically
from autopar.plan import NOTHING_CARRIED, LayerCost, PlanRecord
from autopar.report.strategy import name_span
from autopar.schedules import group_of, stages_of

LANES = ("compute", "communication")
FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "input gradients", "weight gradients"
WAYS = {Kind.FORWARD: FORWARD, Kind.JOINT: FORWARD, Kind.BACKWARD: BACKWARD, Kind.INPUT: INPUT, Kind.WEIGHT: WEIGHT}


@dataclass(frozen=True)
class Slot:
    """A stage running a microbatch one way: `forward`, `backward`, or one of the halves of a split backward pass."""

    stage: int
    microbatch: int
    way: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Event:
    """Something that takes time on a lane of a stage; `microbatch` is None for what is done once a step."""

    stage: int
    lane: str
    kind: str
    name: str
    start_s: float
    duration_s: float
    microbatch: int | None = None


def write_timeline(record: PlanRecord, path: Path) -> None:
    """Write the step to a file; raises PlanError for a plan that doesn't carry the costs of its layers."""
    titles = [f"stage {i}: devices {_span(stage.devices)}" for i, stage in enumerate(record.stages)]
    write_atomically(path, json.dumps(chrome_trace(step_events(record), titles)) + "\n")


def chrome_trace(events: Sequence[Event], stages: Sequence[str]) -> dict[str, Any]:
    """Trace events as Perfetto reads them, times in microseconds; `stages` are the titles of the stages."""
    found: list[dict[str, Any]] = []
    for number, title in enumerate(stages):
        found.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        found += [
            {"ph": "M", "name": "thread_name", "pid": number, "tid": lane, "args": {"name": name}}
            for lane, name in enumerate(LANES)
        ]
    for event in events:
        arguments = {} if event.microbatch is None else {"microbatch": event.microbatch}
        found.append({
            "ph": "X", "name": event.name, "cat": event.kind, "pid": event.stage, "tid": LANES.index(event.lane),
            "ts": event.start_s * 1e6, "dur": event.duration_s * 1e6, "args": arguments,
        })  # fmt: skip
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def step_events(record: PlanRecord) -> list[Event]:
    """Everything that takes time in a step, stage by stage in order of time."""
    if not record.costs.layers:
        raise PlanError(NOTHING_CARRIED)
    named = [_named_costs(record, stage) for stage in range(len(record.stages))]
    events: list[Event] = []
    groups = record.pp_degree
    ends = [0.0] * groups
    for slot in slots(record):
        events += _passes(slot, named[slot.stage])
        group = group_of(record.schedule, slot.stage, groups)
        ends[group] = max(ends[group], slot.end_s)
    for group, end_s in enumerate(ends):
        shared_s = record.costs.shared_s[group] if groups > 1 else 0.0
        mine = stages_of(record.schedule, group, groups, len(named))
        events += _step(group, [cost for stage in mine for cost in named[stage]], end_s, shared_s)
    return events


def slots(record: PlanRecord) -> Iterator[Slot]:
    """When each stage runs each microbatch: by simulation, on one stage one after the other, forward and backward."""
    passes = [{way: _stage_s(record, stage, way) for way in (FORWARD, BACKWARD)} for stage in range(len(record.stages))]
    if record.pp_degree > 1:
        yield from _simulated(record, passes)
        return
    at_s = 0.0
    for microbatch in range(record.num_microbatches):
        for way, seconds in passes[0].items():
            yield Slot(0, microbatch, way, at_s, at_s + seconds)
            at_s += seconds


def _simulated(record: PlanRecord, passes: Sequence[Mapping[str, float]]) -> Iterator[Slot]:
    groups = record.pp_degree
    shape = Shape(record.schedule, groups, len(passes) // groups, record.num_microbatches)
    forward, backward = ([p[way] for p in passes] for way in (FORWARD, BACKWARD))
    weights = [_stage_s(record, stage, WEIGHT) for stage in range(len(passes))]
    found = simulate(shape, forward, backward, record.costs.cut_s, [0.0] * len(passes), weights)
    for event in found.timeline:
        yield Slot(event.stage, event.microbatch, WAYS[event.kind], event.start_s, event.end_s)


def _stage_s(record: PlanRecord, stage: int, way: str) -> float:
    """Seconds of a microbatch through a stage one way."""
    costs = [cost for cost in record.costs.layers if cost.stage == stage]
    return sum(cost.count * seconds for cost in costs for _, seconds in _parts(cost, way))


Named = list[tuple[str, LayerCost]]


def _named_costs(record: PlanRecord, stage: int) -> Named:
    """Costs of the layers of a stage under the names of these layers."""
    found, first = [], record.stages[stage].first_layer
    for cost in record.costs.layers:
        if cost.stage == stage:
            found.append((name_span(record.layer_names[first : first + cost.count]), cost))
            first += cost.count
    return found


def _parts(cost: LayerCost, way: str) -> Iterator[tuple[str, float]]:
    """Parts of one layer's pass with their seconds, in the order in which they are shown."""
    if way == WEIGHT:
        yield BACKWARD, cost.weight_s
        return
    late_s = cost.weight_s if way == INPUT else 0.0
    for part in (FORWARD, "forward communication") if way == FORWARD else _BACK:
        yield part, cost.pass_s.get(part, 0.0) - (late_s if part == BACKWARD else 0.0)


_BACK = ("recompute", BACKWARD, "backward communication")


def _passes(slot: Slot, costs: Named) -> Iterator[Event]:
    at_s = slot.start_s
    for name, cost in costs if slot.way == FORWARD else reversed(costs):
        for part, each in _parts(cost, slot.way):
            seconds = cost.count * each
            lane = LANES[part.endswith("communication")]
            if seconds > 0:
                title = slot.way if slot.way in (INPUT, WEIGHT) and part == BACKWARD else part
                yield Event(slot.stage, lane, part, f"{title} {name}", at_s, seconds, slot.microbatch)
            at_s += seconds


def _step(stage: int, costs: Named, start_s: float, shared_s: float) -> Iterator[Event]:
    """What is done once a step, by kind: gradients are summed first, then parameters updated."""
    for kind in ("compute", "communication", "optimizer"):
        seconds = sum(cost.count * cost.step_s.get(kind, 0.0) for _, cost in costs)
        seconds += shared_s if kind == "communication" else 0.0
        lane = LANES[kind == "communication"]
        if seconds > 0:
            name = "optimizer step" if kind == "optimizer" else f"gradients: {kind}"
            yield Event(stage, lane, kind, name, start_s, seconds)
        start_s += seconds


def _span(devices: Sequence[int]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"
