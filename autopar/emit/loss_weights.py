"""How much of the loss of the global batch each microbatch is: its share of what the loss is a mean over.

A mean over tokens that leaves some out (cross-entropy with `ignore_index`) is over unequal counts; they depend on the
labels only and are counted beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.emit.groups import Axes, StageGroups
from autopar.emit.inputs import rows_of
from autopar.emit.program import ProgramCode, outputs_only
from autopar.emit.route import Route, Visit, plan_route
from autopar.graph import Layout, LossForm, OpGraph
from autopar.shard.program import Call, Program

Weights: TypeAlias = Callable[[Sequence[dict[str, Tensor]], int], list[float]]
"""The weight of the loss of each microbatch, of the given number of samples."""


class EqualWeights:
    """Every microbatch has the same weight: 1 where the loss is a `sum`, else its equal share (of `share`)."""

    def __init__(self, kind: str, share: float = 1.0) -> None:
        self._sum, self._share = kind == "sum", share

    def __call__(self, parts: Sequence[dict[str, Tensor]], _batch: int) -> list[float]:
        """The weight of each of `parts`."""
        return [self._share if self._sum else self._share / len(parts)] * len(parts)


def equal_means(graph: OpGraph, replicas: int) -> EqualWeights:
    """The weights of a mean of means: sums are those of all replicas, means their mean already."""
    summed = graph.loss_form is not None and graph.loss_form.kind == "sum"
    return EqualWeights("mean", 1 / replicas if summed else 1.0)


class CountedWeights:
    """Each microbatch weighs as much as the targets in it that count, found by running the layers' way to them."""

    def __init__(
        self,
        graph: OpGraph,
        form: LossForm,
        codes: list[ProgramCode],
        route: Route,
        axes: Axes,
        groups: StageGroups,
        own_rows: bool = False,
    ) -> None:
        self._form, self._codes, self._route, self._groups, self._axes = form, codes, route, groups, axes
        self._graph, self._own_rows = graph, own_rows

    def __call__(self, parts: Sequence[dict[str, Tensor]], batch: int) -> list[float]:
        """The weight of each of `parts`, microbatches of `batch` samples; they sum to 1."""
        if len(parts) == 1:
            return [1.0]
        counts = torch.stack([self._count(part, batch) for part in parts])
        if self._axes:
            dist.all_reduce(counts, group=self._groups.group(self._axes))
        found: list[int] = counts.tolist()
        total = sum(found)
        return [n / total for n in found] if total else [1 / len(parts)] * len(parts)

    def _count(self, part: dict[str, Tensor], batch: int) -> Tensor:
        batch = rows_of(self._graph, part) if self._own_rows else batch
        (target,) = self._route.run(part, batch, lambda i, inputs: self._codes[i].at(batch, False)(None, *inputs))
        return (target != self._form.ignore_index).sum()


def microbatch_weights(
    graph: OpGraph,
    visits: Sequence[Visit],
    programs: Sequence[Program],
    arrival: dict[str, Layout],
    groups: StageGroups,
    rows: tuple[StageGroups, Axes] | None = None,
) -> Weights:
    """What weighs the microbatches of a global loss. `visits` and `programs` are those of all layers of the model.

    With `rows` the programs are run on a rank's own rows alone, which are dealt over these axes.
    """
    form = graph.loss_form
    if form is None or form.kind != "count":  # without a form there is one microbatch
        return EqualWeights(form.kind if form else "mean")
    call = next(s for s in programs[form.layer].steps if isinstance(s, Call) and s.op.name == form.op)
    place = call.op.operands.index(form.target)
    target, layout = call.operands[place], call.operand_layouts[place]
    kept, cut = zip(*_ways_to(target, visits[: form.layer + 1], programs[: form.layer + 1]), strict=True)
    route = plan_route(graph, kept, arrival, {GOAL: layout}, groups)
    codes = [ProgramCode(p, groups) for p in cut]
    if rows is not None:
        return CountedWeights(graph, form, codes, route, rows[1], rows[0], own_rows=True)
    return CountedWeights(graph, form, codes, route, tuple(a for a, p in enumerate(layout) if p >= 0), groups)


GOAL = "<targets of the loss>"
"""Name of the targets on their route; no value of a model is called so."""


def _ways_to(target: str, visits: Sequence[Visit], programs: Sequence[Program]) -> list[tuple[Visit, Program]]:
    """The layers on the way from the model's inputs to `target` of the last one, each cut down to what it takes."""
    wanted, found = {GOAL}, list[tuple[Visit, Program]]()
    for visit, program in zip(reversed(visits), reversed(programs), strict=True):
        made = dict(zip(visit.outputs, program.outputs, strict=True)) | {GOAL: target}
        names = tuple(n for n in made if n in wanted)
        if not names:
            continue
        cut = outputs_only(program, tuple(made[n] for n in names))
        read = [i for i, n in enumerate(program.inputs) if n in cut.inputs]
        inputs = tuple(visit.inputs[i] for i in read)
        layouts = tuple(program.layouts[n] for n in cut.outputs)
        found.append((Visit(inputs, tuple(visit.input_layouts[i] for i in read), names, layouts), cut))
        wanted = wanted.difference(names).union(inputs)
    return found[::-1]
