"""The layers of a stage: lowered, each with its strategy, and how the model's inputs arrive at them."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.emit.crossing import mesh_sizes
from autopar.emit.groups import Axes
from autopar.emit.route import Visit
from autopar.graph import REPLICATE, Layer, Layout, OpGraph
from autopar.plan import LayerStrategy, StagePlan
from autopar.shard.lower import lower_layer
from autopar.shard.program import Program


def lower_stage(graph: OpGraph, stage: StagePlan) -> list[Program]:
    """The program of each layer of the stage; equal ones are one object."""
    sizes = mesh_sizes(stage)
    found: dict[tuple[object, ...], Program] = {}
    programs = []
    for i, choice in enumerate(stage.assignment):
        index = stage.first_layer + i
        layer, front, behind = graph.layers[index], graph.cuts[index].main, graph.cuts[index + 1].main
        places = [layer.inputs.index(n) if n in layer.inputs else -1 for n in (front, behind)]
        places += [layer.outputs.index(behind)] if behind in layer.outputs else [-1]
        key = (layer.class_index, choice, *places, repr(graph.values[front]), repr(graph.values[behind]))
        if key not in found:
            found[key] = lower_layer(graph, index, stage.strategies[choice], sizes)
        programs.append(found[key])
    return programs


@dataclass(frozen=True)
class Placement:
    """A layer of the stage with its strategy, program, data axes and those of them that ZeRO shards over."""

    layer: Layer
    strategy: LayerStrategy
    program: Program
    data_axes: Axes
    zero_axes: Axes

    @property
    def visit(self) -> Visit:
        """The layer's names and layouts on the stage's route."""
        layouts, program = self.program.layouts, self.program
        ins, outs = (tuple(layouts[n] for n in names) for names in (program.inputs, program.outputs))
        return Visit(self.layer.inputs, ins, self.layer.outputs, outs)


def place_layers(graph: OpGraph, stage: StagePlan) -> list[Placement]:
    """Every layer of the stage, lowered."""
    found = []
    for i, program in enumerate(lower_stage(graph, stage)):
        strategy = stage.strategies[stage.assignment[i]]
        batch_dim = graph.values[graph.cuts[stage.first_layer + i].main].batch_dim
        axes = strategy.data_axes(batch_dim), strategy.zero_axes(batch_dim, program.axis_sizes)
        found.append(Placement(graph.layers[stage.first_layer + i], strategy, program, *axes))
    return found


def arrival_layouts(graph: OpGraph, data_axes: Axes, axes: int) -> dict[str, Layout]:
    """How the model's inputs lie when a rank is given its rows: split by samples over `data_axes`."""
    found: dict[str, Layout] = {}
    for name in graph.inputs:
        dim = graph.values[name].batch_dim
        found[name] = tuple(dim if a in data_axes and dim is not None else REPLICATE for a in range(axes))
    return found
