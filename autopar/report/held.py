"""The bytes that each group of a plan's devices keeps, as a step goes by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.plan import LayerCost, PlanRecord
from autopar.report.timeline import BACKWARD, FORWARD, INPUT, WEIGHT, slots
from autopar.schedules import group_of, stages_of


class Held(NamedTuple):
    """Bytes kept on a device of a group, at a moment of the step in seconds from its start."""

    at_s: float
    size_bytes: float


def held_over_time(record: PlanRecord) -> list[list[Held]]:
    """Of each group of devices the moments between which its bytes grow and shrink evenly.

    Kept are parameters and optimizer states, gradients once they are made, and what backward passes will need.
    Temporaries of a layer or of the optimizer's step come on top: they are what is missing to the peak.
    """
    groups = record.pp_degree
    stages = [[cost for cost in record.costs.layers if cost.stage == s] for s in range(len(record.stages))]
    mine = [stages_of(record.schedule, g, groups, len(stages)) for g in range(groups)]
    found = [[Held(0.0, sum(_always(stages[s]) for s in own))] for own in mine]
    begun: set[tuple[int, tuple[str, ...]]] = set()
    for slot in sorted(slots(record), key=lambda slot: slot.start_s):
        line, own = found[group_of(record.schedule, slot.stage, groups)], stages[slot.stage]
        saved, waits = _bytes(own, "saved"), _bytes(own, "put_off")
        change = {FORWARD: saved, INPUT: waits - saved, WEIGHT: -waits}.get(slot.way, -saved)
        late = _bytes(own, "late")
        for comes, size in (((INPUT, BACKWARD), _bytes(own, "gradients") - late), ((WEIGHT, BACKWARD), late)):
            if slot.way in comes and (slot.stage, comes) not in begun:
                change += size
                begun.add((slot.stage, comes))
        before = line[-1].size_bytes
        line += [Held(slot.start_s, before), Held(slot.end_s, before + change)]
    for line in found:
        line += [Held(record.step_time_s, line[-1].size_bytes), Held(record.step_time_s, line[0].size_bytes)]
    return found


def _always(costs: Sequence[LayerCost]) -> float:
    return sum(_bytes(costs, name) for name in ("parameters", "optimizer", "inputs"))


def _bytes(costs: Sequence[LayerCost], name: str) -> float:
    return sum(cost.count * cost.memory.get(name, 0) for cost in costs)
