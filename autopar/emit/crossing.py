"""What passes from one pipeline stage to the next, and how it lies: the same shard for both ends of each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from autopar.emit.route import crossing_layout
from autopar.errors import PlanError
from autopar.graph import REPLICATE, Layout, OpGraph, TensorSpec, axes_of, is_even, layout_text, local_shape, unit_of
from autopar.plan import StagePlan, expanded, prime_sizes
from autopar.schedules import group_of
from autopar.shard.cuts import Spot


def mesh_sizes(stage: StagePlan) -> tuple[int, ...]:
    """Sizes of the axes of a stage's mesh."""
    return tuple(axis.size for axis in stage.mesh)


@dataclass(frozen=True)
class Comparison:
    """How layouts of several stages are compared: as they are where all have the same mesh, else over prime factors."""

    primes: bool

    @classmethod
    def of(cls, stages: Sequence[StagePlan]) -> Comparison:
        """The comparison for the stages of a pipeline."""
        return cls(len({mesh_sizes(stage) for stage in stages}) > 1)

    def sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that layouts over axes of `sizes` are compared on."""
        return prime_sizes(sizes) if self.primes else sizes

    def layout(self, layout: Layout, sizes: tuple[int, ...]) -> Layout:
        """`layout` over these axes."""
        return expanded(layout, sizes) if self.primes else layout

    def elsewhere(self, layout: Layout, sizes: tuple[int, ...], other: tuple[int, ...], what: str) -> Layout:
        """`layout` over a mesh of `sizes` as one over the axes that a mesh of `other` sizes is compared on.

        Raises PlanError where the factors differ in order and the layout is not whole everywhere.
        """
        if self.sizes(sizes) == self.sizes(other):
            return self.layout(layout, sizes)
        if all(p == REPLICATE for p in layout):
            return (REPLICATE,) * len(prime_sizes(other))
        raise PlanError(
            f"{what} lies as {layout_text(layout)!r} on a mesh of {sizes} and is needed on one of {other}: their prime "
            f"factors differ, so no two ranks hold the same shard. Make the plan anew."
        )

    def check(self, spec: TensorSpec, batch: int, layout: Layout, sizes: tuple[int, ...], what: str) -> None:
        """Raise PlanError where a value is split unevenly: the prime factors of an axis may cut it elsewhere."""
        for dim, extent in enumerate(spec.shape) if self.primes else ():
            if not is_even(extent.at(batch), unit_of(extent), [sizes[a] for a in axes_of(layout, dim)]):
                raise PlanError(
                    f"{what}: dim {dim} of {extent.at(batch)} does not divide on a mesh of {sizes}, and stages have "
                    f"other meshes. Choose a batch that divides, or one mesh for all stages."
                )


@dataclass(frozen=True)
class Port:
    """Stage `number` of a pipeline: layouts of what it `receives` from the stage before and `sends` to the next.

    Layouts are over the axes of `sizes` that stages are compared on. The model's own inputs are no part of it: every
    rank is given them. The last stage sends the loss, to nobody.
    """

    number: int
    sizes: tuple[int, ...]
    receives: dict[str, Layout]
    sends: dict[str, Layout]


def plan_ports(graph: OpGraph, stages: tuple[StagePlan, ...], batch: int) -> tuple[Port, ...]:
    """The ports of all stages, for global microbatches of `batch` samples.

    Raises PlanError where two stages want a value that passes between them in different layouts: each rank sends to
    one other.
    """
    both = Comparison.of(stages)
    sizes = [both.sizes(mesh_sizes(stage)) for stage in stages]
    pairs = [_crossing(graph, before, after, both, batch) for before, after in pairwise(stages)]
    receives = [{}, *(received for _, received in pairs)]
    sends = [*(sent for sent, _ in pairs), {graph.loss or "": (REPLICATE,) * len(sizes[-1])}]
    return tuple(Port(*each) for each in zip(range(len(stages)), sizes, receives, sends, strict=True))


def _crossing(
    graph: OpGraph, before: StagePlan, after: StagePlan, both: Comparison, batch: int
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """What `before` sends to `after`, and what `after` receives."""
    main, ours, theirs = graph.cuts[after.first_layer].main, mesh_sizes(before), mesh_sizes(after)
    leaves = before.strategies[before.assignment[-1]].exit
    enters = after.strategies[after.assignment[0]].entry
    names = crossing_names(graph, after.first_layer)
    sent = {n: crossing_layout(graph, main, leaves, n) for n in names}
    received = {n: both.layout(crossing_layout(graph, main, enters, n), theirs) for n in names}
    for name in names:
        both.check(graph.values[name], batch, sent[name], ours, name)
        arrives = both.elsewhere(sent[name], ours, theirs, name)
        if received[name] != arrives:
            raise PlanError(
                f"{name} leaves a pipeline stage as {layout_text(arrives)!r} and is to enter the next, in front of "
                f"layer {graph.layers[after.first_layer].name}, as {layout_text(received[name])!r} (over prime factors "
                f"of the mesh axes); the two must be equal. Make the plan anew."
            )
    return {n: both.layout(layout, ours) for n, layout in sent.items()}, received


def crossing_names(graph: OpGraph, first: int) -> tuple[str, ...]:
    """What layers before layer `first` make and it or later ones read."""
    read = {n for layer in graph.layers[first:] for n in layer.inputs} | {graph.loss}
    made = dict.fromkeys(n for layer in graph.layers[:first] for n in layer.outputs)
    return tuple(n for n in made if n in read and n not in graph.inputs)


def placeholders(graph: OpGraph, layouts: Mapping[str, Layout], spot: Spot, batch: int) -> list[Tensor]:
    """Meta tensors of a rank's shards of values at a global microbatch of `batch`."""
    made = []
    for name, layout in layouts.items():
        spec = graph.values[name]
        shape = local_shape(spec, batch, layout, spot.sizes, spot.place)
        made.append(torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta"))
        if spec.requires_grad and made[-1].is_floating_point():
            made[-1].requires_grad_()
    return made


def check_stages(graph: OpGraph, stages: tuple[StagePlan, ...], groups: int, schedule: str) -> None:
    """Raise PlanError unless the stages cover all layers in order and stand on `groups` disjoint, equal groups.

    `schedule` says which stage is on which group.
    """
    teams = [stage.devices for stage in stages[:groups]]
    ends = [stage.first_layer + len(stage.assignment) for stage in stages]
    wrong = []
    if [stage.first_layer for stage in stages] != [0, *ends[:-1]] or ends[-1] != len(graph.layers):
        wrong.append(f"stages start at layers {[s.first_layer for s in stages]} and end before {ends}")
    if len({len(team) for team in teams}) != 1 or len({d for t in teams for d in t}) != sum(map(len, teams)):
        wrong.append(f"groups of devices {teams} are not disjoint and equally large")
    if any(stage.devices != teams[group_of(schedule, i, groups)] for i, stage in enumerate(stages)):
        wrong.append(f"stages stand on {[s.devices for s in stages]}, not on {groups} groups as {schedule} has them")
    if not all(teams) or any(prod(mesh_sizes(stage)) != len(stage.devices) for stage in stages):
        wrong.append(f"meshes of {[mesh_sizes(s) for s in stages]} don't hold the devices")
    if wrong:
        raise PlanError(f"the plan's stages can't be run: {'; '.join(wrong)}. Make the plan anew.")
