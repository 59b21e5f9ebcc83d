"""What passes from one pipeline stage to the next, and how it lies: the same shard for both ends of each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from autopar.emit.route import crossing_layout
from autopar.errors import PlanError
from autopar.graph import REPLICATE, Layout, OpGraph, layout_text, local_shape
from autopar.plan import StagePlan, expanded, prime_sizes


def mesh_sizes(stage: StagePlan) -> tuple[int, ...]:
    """Sizes of the axes of a stage's mesh."""
    return tuple(axis.size for axis in stage.mesh)


@dataclass(frozen=True)
class Port:
    """Stage `number` of a pipeline: layouts of what it `receives` from the stage before and `sends` to the next.

    Layouts are over the prime factors of its mesh axes, `sizes`. The model's own inputs are no part of it: every rank
    is given them. The last stage sends the loss, to nobody.
    """

    number: int
    sizes: tuple[int, ...]
    receives: dict[str, Layout]
    sends: dict[str, Layout]


def plan_ports(graph: OpGraph, stages: tuple[StagePlan, ...]) -> tuple[Port, ...]:
    """The ports of all stages.

    Raises PlanError where two stages want a value that passes between them in different layouts: each rank sends to
    one other.
    """
    sizes = [prime_sizes(mesh_sizes(stage)) for stage in stages]
    pairs = [_crossing(graph, before, after) for before, after in pairwise(stages)]
    receives = [{}, *(received for _, received in pairs)]
    sends = [*(sent for sent, _ in pairs), {graph.loss or "": (REPLICATE,) * len(sizes[-1])}]
    return tuple(Port(*each) for each in zip(range(len(stages)), sizes, receives, sends, strict=True))


def _crossing(graph: OpGraph, before: StagePlan, after: StagePlan) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """What `before` sends to `after`, and what `after` receives."""
    main, ours, theirs = graph.cuts[after.first_layer].main, mesh_sizes(before), mesh_sizes(after)
    leaves = before.strategies[before.assignment[-1]].exit
    enters = after.strategies[after.assignment[0]].entry
    names = crossing_names(graph, after.first_layer)
    sent = {n: crossing_layout(graph, main, leaves, n) for n in names}
    received = {n: expanded(crossing_layout(graph, main, enters, n), theirs) for n in names}
    for name in names:
        arrives = over_primes(sent[name], ours, theirs, name)
        if received[name] != arrives:
            raise PlanError(
                f"{name} leaves a pipeline stage as {layout_text(arrives)!r} and is to enter the next, in front of "
                f"layer {graph.layers[after.first_layer].name}, as {layout_text(received[name])!r} (over prime factors "
                f"of the mesh axes); the two must be equal. Make the plan anew."
            )
    return {n: expanded(layout, ours) for n, layout in sent.items()}, received


def crossing_names(graph: OpGraph, first: int) -> tuple[str, ...]:
    """What layers before layer `first` make and it or later ones read."""
    read = {n for layer in graph.layers[first:] for n in layer.inputs} | {graph.loss}
    made = dict.fromkeys(n for layer in graph.layers[:first] for n in layer.outputs)
    return tuple(n for n in made if n in read and n not in graph.inputs)


def over_primes(layout: Layout, sizes: tuple[int, ...], other: tuple[int, ...], what: str) -> Layout:
    """`layout` over a mesh of `sizes` as one over the prime factors of a mesh of `other` sizes.

    Raises PlanError where the factors differ in order and the layout is not whole everywhere.
    """
    if prime_sizes(sizes) == prime_sizes(other):
        return expanded(layout, sizes)
    if all(p == REPLICATE for p in layout):
        return (REPLICATE,) * len(prime_sizes(other))
    raise PlanError(
        f"{what} lies as {layout_text(layout)!r} on a mesh of {sizes} and is needed on one of {other}: their prime "
        f"factors differ, so no two ranks hold the same shard. Make the plan anew."
    )


def placeholders(graph: OpGraph, layouts: Mapping[str, Layout], sizes: tuple[int, ...], batch: int) -> list[Tensor]:
    """Meta tensors of a rank's shards of values at a global microbatch of `batch`; `sizes` are of prime axes."""
    made = []
    for name, layout in layouts.items():
        spec = graph.values[name]
        shape = local_shape(spec, batch, layout, sizes)
        made.append(torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta"))
        if spec.requires_grad and made[-1].is_floating_point():
            made[-1].requires_grad_()
    return made


def check_stages(graph: OpGraph, stages: tuple[StagePlan, ...], groups: int) -> None:
    """Raise PlanError unless the stages cover all layers in order and stand on `groups` disjoint, equal groups."""
    teams = [stage.devices for stage in stages[:groups]]
    ends = [stage.first_layer + len(stage.assignment) for stage in stages]
    wrong = []
    if [stage.first_layer for stage in stages] != [0, *ends[:-1]] or ends[-1] != len(graph.layers):
        wrong.append(f"stages start at layers {[s.first_layer for s in stages]} and end before {ends}")
    if len({len(team) for team in teams}) != 1 or len({d for t in teams for d in t}) != sum(map(len, teams)):
        wrong.append(f"groups of devices {teams} are not disjoint and equally large")
    if any(stage.devices != teams[i % groups] for i, stage in enumerate(stages)):
        wrong.append(f"stages stand on {[s.devices for s in stages]}, not on {groups} groups in turn")
    if any(prod(mesh_sizes(stage)) != len(stage.devices) for stage in stages):
        wrong.append(f"meshes of {[mesh_sizes(s) for s in stages]} don't hold the devices")
    if wrong:
        raise PlanError(f"the plan's pipeline can't be run: {'; '.join(wrong)}. Make the plan anew.")
