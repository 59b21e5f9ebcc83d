"""How named values travel through the layers of a stage: what each layer reads, re-laid where it lies otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from autopar.emit.groups import StageGroups
from autopar.emit.program import Between
from autopar.graph import Layout, OpGraph, follow_layout

RunLayer: TypeAlias = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""Runs the i-th layer on its inputs."""


@dataclass(frozen=True)
class Visit:
    """A layer by the model-wide names and the layouts of what it reads and makes."""

    inputs: tuple[str, ...]
    input_layouts: tuple[Layout, ...]
    outputs: tuple[str, ...]
    output_layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Hop:
    """A visit, the changes of layout before it, and the values not read after it."""

    visit: Visit
    relays: tuple[tuple[str, Between], ...]
    dead: tuple[str, ...]


@dataclass(frozen=True)
class Route:
    """All hops on the way to the values `goals`, and their own changes of layout at the end."""

    hops: tuple[Hop, ...]
    goals: tuple[str, ...]
    relays: tuple[tuple[str, Between], ...]

    def run(self, values: dict[str, Tensor], batch: int, run_layer: RunLayer) -> tuple[Tensor, ...]:
        """The goals, from the values that arrive, of a global microbatch of `batch` samples."""
        values = dict(values)
        for i, hop in enumerate(self.hops):
            for name, relay in hop.relays:
                values[name] = relay(values[name], batch)
            results = run_layer(i, [values[n] for n in hop.visit.inputs])
            values.update(zip(hop.visit.outputs, results, strict=True))
            for name in hop.dead:
                values.pop(name, None)
        for name, relay in self.relays:
            values[name] = relay(values[name], batch)
        return tuple(values[n] for n in self.goals)


def crossing_layout(graph: OpGraph, main: str, layout: Layout, name: str) -> Layout:
    """Layout of `name` at a cut whose main value lies in `layout`."""
    return layout if name == main else follow_layout(graph.values[main], layout, graph.values[name])


def plan_route(
    graph: OpGraph, visits: Sequence[Visit], arrival: dict[str, Layout], goals: dict[str, Layout], groups: StageGroups
) -> Route:
    """The route to `goals`, each in its layout; `arrival` are the layouts in which values from elsewhere arrive.

    Makes the process groups it needs. Raises PlanError where a value can't be put where a layer needs it.
    """
    lies = dict(arrival)

    def lay(names: Sequence[str], layouts: Sequence[Layout]) -> tuple[tuple[str, Between], ...]:
        changes = [(n, needed) for n, needed in zip(names, layouts, strict=True) if lies[n] != needed]
        relays = tuple((n, Between(graph.values[n], lies[n], needed, groups)) for n, needed in changes)
        lies.update(changes)
        return relays

    last_read = {n: i for i, visit in enumerate(visits) for n in visit.inputs}
    hops = []
    for i, visit in enumerate(visits):
        relays = lay(visit.inputs, visit.input_layouts)
        lies.update(zip(visit.outputs, visit.output_layouts, strict=True))
        touched = dict.fromkeys((*visit.inputs, *visit.outputs))
        dead = tuple(n for n in touched if last_read.get(n, -1) <= i and n not in goals)
        hops.append(Hop(visit, relays, dead))
    return Route(tuple(hops), tuple(goals), lay(list(goals), list(goals.values())))
