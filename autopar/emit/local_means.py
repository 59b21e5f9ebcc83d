"""The mean of means that data-parallel training without a plan takes: of what each replica and microbatch counts."""

from __future__ import annotations

from dataclasses import replace

from autopar.emit.crossing import mesh_sizes
from autopar.emit.groups import Axes
from autopar.emit.placements import Placement, place_layers
from autopar.errors import EmitError
from autopar.graph import Layer, OpGraph
from autopar.plan import PlanRecord, StagePlan
from autopar.shard.localize import partial_axes
from autopar.shard.program import Call, Step


def placed(record: PlanRecord, graph: OpGraph, stage: StagePlan, loss: str) -> list[Placement]:
    """The layers of a stage under a way to weigh the loss.

    Raises EmitError where a mean of means is wanted and the plan mixes the rows of replicas before the loss.
    """
    placements, form = place_layers(graph, stage), graph.loss_form
    if loss == "global" or form is None or form.kind != "count":
        return placements
    first = record.stages[0]
    replicas = (placements if stage is first else place_layers(graph, first))[0].data_axes
    loss_layer = graph.layers[form.layer]
    return _apart(loss_layer, form.op, placements, stage, first, replicas) if replicas else placements


def _apart(
    loss_layer: Layer, op: str, placements: list[Placement], stage: StagePlan, first: StagePlan, replicas: Axes
) -> list[Placement]:
    """The loss as the mean of means; `replicas` are the axes of the first stage's mesh that rows are dealt over."""

    def taken(step: Step) -> Step:
        if not isinstance(step, Call) or step.op.name != op:
            return step
        if mesh_sizes(stage) != mesh_sizes(first) or not {*replicas} <= {*partial_axes(step)}:
            raise EmitError(
                "loss='mean_of_means': the plan hands rows of several replicas to one rank before the loss, so that "
                "their means can't be told apart. Take loss='global', or a plan whose loss is split over the batch as "
                "its inputs are."
            )
        return replace(step, apart=replicas)

    found = []
    for placement in placements:
        program = placement.program
        if placement.layer is loss_layer:
            program = replace(program, steps=tuple(map(taken, program.steps)))
        found.append(replace(placement, program=program))
    return found
