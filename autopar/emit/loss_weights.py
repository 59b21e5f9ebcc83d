"""How much of the loss of the global batch each microbatch is: its share of what the loss is a mean over.

A mean over tokens that leaves some out (cross-entropy with `ignore_index`) is over unequal counts; they depend on the
labels only and are counted beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.emit.groups import StageGroups
from autopar.emit.program import ProgramCode, outputs_only
from autopar.emit.route import Route, Visit, plan_route
from autopar.graph import Extent, Layout, Op, OpGraph, Ref
from autopar.shard.program import Call, Program

MEAN, SUM = 1, 2
"""Codes of the `reduction` argument in ATen."""


@dataclass(frozen=True)
class LossForm:
    """How samples meet in the loss: `sum`, `mean` (over equal counts) or `count` (over targets not ignored).

    For `count`: the loss is `op` of the last layer, its targets the value `target`, less those of `ignore_index`.
    """

    kind: str
    op: str = ""
    target: str = ""
    ignore_index: int = -100


def loss_form(graph: OpGraph) -> LossForm:
    """The form of the graph's loss: the first op on the way back from it that brings samples together decides."""
    layer = graph.layers[-1]
    layer_class = graph.classes[layer.class_index]
    if graph.loss not in layer.outputs:
        return LossForm("mean")
    name = layer_class.outputs[layer.outputs.index(graph.loss)]
    while (op := layer_class.producer.get(name)) is not None:
        if any(_scales_with_batch(a) for a in op.args):
            return LossForm("mean")
        if any(layer_class.values[n].batch_dim is not None for n in op.operands):
            return _reduction(op)
        moving = [n for n in dict.fromkeys(op.operands) if layer_class.values[n].requires_grad]
        if len(moving) != 1:
            return LossForm("mean")
        name = moving[0]
    return LossForm("mean")


def _scales_with_batch(argument: object) -> bool:
    return isinstance(argument, Extent) and argument.is_batch


def _reduction(op: Op) -> LossForm:
    kind = op.target.split(".")[1]
    if kind == "cross_entropy_loss":
        names = ("input", "target", "weight", "reduction", "ignore_index")
        given = dict(zip(names, op.args, strict=False)) | dict(op.kwargs)
        target, ignored = given["target"], given.get("ignore_index", -100)
        counted = given.get("reduction", MEAN) == MEAN and given.get("weight") is None
        if counted and isinstance(target, Ref) and isinstance(ignored, int):
            return LossForm("count", op.name, target.name, ignored)
        return LossForm("sum" if given.get("reduction") == SUM else "mean")
    if kind.endswith("_loss"):
        given_reduction = next((a for a in op.args[2:] if isinstance(a, int)), dict(op.kwargs).get("reduction", MEAN))
        return LossForm("sum" if given_reduction == SUM else "mean")
    return LossForm("sum" if kind == "sum" else "mean")


Weights: TypeAlias = Callable[[Sequence[dict[str, Tensor]], int], list[float]]
"""The weight of the loss of each microbatch, of the given number of samples."""


class EqualWeights:
    """Every microbatch of `count` has the same weight: 1 under a sum, its equal share under a mean."""

    def __init__(self, form: LossForm) -> None:
        self._sum = form.kind == "sum"

    def __call__(self, parts: Sequence[dict[str, Tensor]], _batch: int) -> list[float]:
        """The weight of each of `parts`."""
        return [1.0 if self._sum else 1 / len(parts)] * len(parts)


class CountedWeights:
    """Each microbatch weighs as much as the targets in it that count, found by running the layers' way to them."""

    def __init__(
        self, form: LossForm, codes: list[ProgramCode], route: Route, layout: Layout, groups: StageGroups
    ) -> None:
        self._form, self._codes, self._route, self._groups = form, codes, route, groups
        self._axes = tuple(a for a, p in enumerate(layout) if p >= 0)

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
        target = self._route.run(part, lambda i, inputs: self._codes[i].at(batch, False)(None, *inputs))
        return (target != self._form.ignore_index).sum()


def microbatch_weights(
    graph: OpGraph,
    visits: Sequence[Visit],
    programs: Sequence[Program],
    arrival: dict[str, Layout],
    groups: StageGroups,
) -> Weights:
    """What weighs the microbatches of a global loss. `visits` and `programs` are those of all layers of the model."""
    form = loss_form(graph)
    if form.kind != "count":
        return EqualWeights(form)
    call = next(s for s in programs[-1].steps if isinstance(s, Call) and s.op.name == form.op)
    place = call.op.operands.index(form.target)
    target, layout = call.operands[place], call.operand_layouts[place]
    ways = _ways_to(target, visits, programs)
    if ways is None:
        return EqualWeights(LossForm("mean"))
    kept, cut = zip(*ways, strict=True)
    route = plan_route(graph, kept, arrival, GOAL, layout, groups)
    return CountedWeights(form, [ProgramCode(p, groups) for p in cut], route, layout, groups)


GOAL = "<targets of the loss>"
"""Name of the targets on their route; no value of a model is called so."""


def _ways_to(target: str, visits: Sequence[Visit], programs: Sequence[Program]) -> list[tuple[Visit, Program]] | None:
    """The layers on the way from the model's inputs to `target` of the last one, each cut down to what it takes.

    None where parameters or buffers take part.
    """
    wanted, found = {GOAL}, list[tuple[Visit, Program]]()
    for visit, program in zip(reversed(visits), reversed(programs), strict=True):
        made = dict(zip(visit.outputs, program.outputs, strict=True)) | {GOAL: target}
        names = tuple(n for n in made if n in wanted)
        if not names:
            continue
        cut = outputs_only(program, tuple(made[n] for n in names))
        if cut.params or cut.buffers:
            return None
        read = [i for i, n in enumerate(program.inputs) if n in cut.inputs]
        inputs = tuple(visit.inputs[i] for i in read)
        layouts = tuple(program.layouts[n] for n in cut.outputs)
        found.append((Visit(inputs, tuple(visit.input_layouts[i] for i in read), names, layouts), cut))
        wanted = wanted.difference(names).union(inputs)
    return found[::-1]
