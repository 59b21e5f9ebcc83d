"""From a lowered layer to code: one functional `torch.fx.GraphModule`, shared by all layers of a class and strategy."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.emit.again import made_again
from autopar.emit.groups import StageGroups
from autopar.emit.opaque import OpaqueCall, drawn
from autopar.emit.split import SplitProduct, WeightGradients
from autopar.graph import DeviceArg, Dtype, Layout, Ref, TensorSpec
from autopar.shard import collectives, kernels
from autopar.shard.localize import (
    RecutTexts,
    call_info,
    encode_recuts,
    encode_relayout,
    in_evaluation,
    local_call,
)
from autopar.shard.program import Call, Program, Relayout, Step, made_by, read_by
from autopar.shard.put_off import product_with_weight
from autopar.shard.relayout import plan_moves
from autopar.trace.opaque.operator import OPAQUE
from autopar.trace.randomness import draws, draws_whole
from autopar.trace.run import overload
from autopar.trace.shadow import shadow

Submodule: TypeAlias = Callable[[str], nn.Module]
"""Gives the submodule of the model at a path."""


class ProgramCode:
    """A lowered layer as code, built for each global microbatch size when it is first met.

    `submodule` gives those submodules that run as one operator; `gradients` takes those of weights in a split backward
    pass.

    The code takes what dropout draws its masks by (`kernels.dropout`), then parameters, buffers and inputs in the order
    of the program, all local, and returns its outputs.
    """

    def __init__(
        self,
        program: Program,
        groups: StageGroups,
        submodule: Submodule = lambda _: nn.Module(),
        gradients: WeightGradients | None = None,
    ) -> None:
        self.program, self.makes_again = program, program.light
        self._groups = groups
        # copies without data: the model may go once its parameters lie in the stage
        opaque = {s.op.module for s in program.steps if isinstance(s, Call) and s.op.target == OPAQUE}
        self._submodule = {path: shadow(submodule(path)) for path in opaque}.__getitem__
        self._gradients = gradients
        self._built: dict[tuple[int, bool], Callable[..., Any]] = {}

    def at(self, batch: int, training: bool) -> Callable[..., Any]:
        """The code at a global microbatch of `batch` samples; outside training dropout does nothing."""
        key = (batch, training)
        if key not in self._built:
            writer = Writer(self.program, batch, self._groups, training, self._submodule, self._gradients)
            self._built[key] = writer.write().forward
        return self._built[key]


DRAW = "draw"
"""Name of the argument that says what dropout masks to draw."""


def is_dropout(step: Step) -> bool:
    """Whether the step is a dropout whose masks are drawn by place."""
    return isinstance(step, Call) and step.kernel == "dropout"


def is_told(step: Step) -> bool:
    """Whether the step is told what random numbers to draw."""
    return is_dropout(step) or (isinstance(step, Call) and draws(step.op))


class Region(nn.Module):
    """A part of a layer's code of which only the inputs are kept for the backward pass, in which it is run again.

    What a `light` one makes is not kept by others either (`again.py`); compiled code decides that by itself.
    """

    def __init__(self, code: fx.GraphModule, light: bool) -> None:
        super().__init__()
        self.code, self.light = code, light

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the code makes of `inputs`."""
        if not torch.is_grad_enabled():
            return self.code(*inputs)  # type: ignore[no-any-return]
        if self.light and not torch.compiler.is_compiling():
            return made_again(self.code, *inputs)
        # Code draws no random numbers of torch's own: dropout masks are a function of `draw`.
        return checkpoint(self.code, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class Writer:
    """Writes the graph of a program, or of one of its regions, step by step."""

    def __init__(
        self,
        program: Program,
        batch: int,
        groups: StageGroups,
        training: bool,
        submodule: Submodule,
        gradients: WeightGradients | None,
    ) -> None:
        self.program, self.batch, self.groups, self.training = program, batch, groups, training
        self.submodule, self.gradients = submodule, gradients
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.root = nn.Module()

    def write(self) -> fx.GraphModule:
        """The code of the whole program."""
        program = self.program
        names = (DRAW, *program.params, *program.buffers, *program.inputs)
        return self._write("Layer", names, range(len(program.steps)), program.outputs, program.regions)

    def _write(
        self, kind: str, names: Sequence[str], steps: range, outputs: Sequence[str], regions: Sequence[range] = ()
    ) -> fx.GraphModule:
        for name, word in zip(names, identifiers(names), strict=True):
            self.nodes[name] = self.graph.placeholder(word)
        starts, inside = {region.start: region for region in regions}, {i for region in regions for i in region}
        for i in steps:
            step = self.program.steps[i]
            if i in starts:
                self._region(starts[i])
            elif i in inside:
                continue
            elif isinstance(step, Relayout):
                self._relayout(step)
            else:
                self._call(step)
        self.graph.output(tuple(self.nodes[n] for n in outputs))
        return fx.GraphModule(self.root, self.graph, class_name=kind)

    def _region(self, region: range) -> None:
        told = (DRAW,) if any(is_told(self.program.steps[i]) for i in region) else ()
        reads, makes = (*told, *self.program.entering(region)), self.program.leaving(region)
        writer = Writer(self.program, self.batch, self.groups, self.training, self.submodule, self.gradients)
        code = writer._write("Region", reads, region, makes)
        name = f"region_{region.start}"
        self.root.add_module(name, Region(code, self.program.light))
        made = self.graph.call_module(name, tuple(self.nodes[n] for n in reads))
        for i, result in enumerate(makes):
            self.nodes[result] = self.graph.call_function(operator.getitem, (made, i))

    def _relayout(self, step: Relayout) -> None:
        spec = self.program.values[step.source]
        moves = encode_relayout(step, spec, self.batch, self.groups.spot, self.groups.name)
        source = self.nodes[step.source]
        self.nodes[step.result] = self._moved(source, *moves) if any(moves) else source

    def _moved(self, source: fx.Node, forward: Sequence[str], backward: Sequence[str]) -> fx.Node:
        return self.graph.call_function(collectives.relayout, (source, list(forward), list(backward)))

    def _call(self, step: Call) -> None:
        if not self.training and is_dropout(step):
            self.nodes[step.op.results[0]] = self.nodes[step.operands[0]]
            return
        if not self.training:
            step = in_evaluation(step)
        recuts = {r.index: r for r in encode_recuts(step, self.program, self.batch, self.groups.name)}
        kept = self.nodes
        self.nodes = kept | {n: self._recut(kept[n], recuts.get(i)) for i, n in enumerate(step.operands)}
        made = self._made(step)
        self.nodes = kept
        self._name_results(step, made, several=returns_several(step.op.target))
        for i, result in enumerate(step.op.results, len(step.operands)):
            self.nodes[result] = self._recut(self.nodes[result], recuts.get(i))

    def _recut(self, source: fx.Node, texts: RecutTexts | None) -> fx.Node:
        return self._moved(source, texts.forward, texts.backward) if texts else source

    def _made(self, step: Call) -> fx.Node:
        place = self.groups.spot.place
        call = local_call(step, self.program, self.batch, place)
        args, kwargs = self._argument(call.args), self._argument(call.kwargs)
        if step.op.target == OPAQUE:
            tensors, form = call.args
            self.root.add_module(
                step.op.name, OpaqueCall(self.submodule(step.op.module), step.op.module, form, self.training)
            )
            draw = self.nodes[DRAW] if is_told(step) else None
            return self.graph.call_module(step.op.name, (draw, *self._argument(tensors)))
        if draws_whole(step.op):
            return self.graph.call_function(drawn, (self.nodes[DRAW], step.op.name, call.target, args, kwargs))
        roles = product_with_weight(step, self.program)
        if roles and self.gradients and self.training:
            self.root.add_module(step.op.name, SplitProduct(overload(call.target), roles, self.gradients))
            return self.graph.call_module(step.op.name, args)
        if not step.kernel:
            return self.graph.call_function(overload(call.target), args, kwargs)
        info = call_info(step, self.program, self.batch, self.groups.name, place)
        masks = {"draw": self.nodes[DRAW]} if is_dropout(step) else {}
        known = self._attribute(f"{step.op.name}_info", info)
        return self.graph.call_function(kernels.kernel(step.kernel), (known, *args), kwargs | masks)

    def _attribute(self, name: str, value: object) -> fx.Node:
        """A constant of the code that is no literal."""
        setattr(self.root, name, value)
        return self.graph.get_attr(name)

    def _name_results(self, step: Call, made: fx.Node, several: bool) -> None:
        if not several:
            self.nodes[step.op.results[0]] = made
            return
        for i, result in enumerate(step.op.results):
            self.nodes[result] = self.graph.call_function(operator.getitem, (made, i))

    def _argument(self, argument: Any) -> Any:
        """The argument with nodes for names, and torch's own dtypes and device."""
        if isinstance(argument, Ref):
            return self.nodes[argument.name]
        if isinstance(argument, Dtype):
            return getattr(torch, argument.name)
        if isinstance(argument, DeviceArg):
            return self.groups.device
        if isinstance(argument, dict):
            return {k: self._argument(v) for k, v in argument.items()}
        if isinstance(argument, tuple):
            return tuple(self._argument(a) for a in argument)
        return argument


def identifiers(names: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """Words of Python for dotted names, all different and none of those `taken`."""
    words: list[str] = []
    for name in names:
        word = re.sub(r"\W|^(?=\d)", "_", name)
        while word in words or word in taken or keyword.iskeyword(word):
            word += "_"
        words.append(word)
    return words


def returns_several(target: str) -> bool:
    """Whether the overload returns a list or several tensors."""
    returns = overload(target)._schema.returns
    return len(returns) > 1 or str(returns[0].type) != "Tensor"


class Between:
    """Puts a local tensor of a value from one layout into another, at a global microbatch of so many samples."""

    def __init__(self, spec: TensorSpec, source: Layout, target: Layout, groups: StageGroups) -> None:
        moves = plan_moves(source, target)
        backward = moves.backward if spec.requires_grad else ()
        self._step = Relayout("", "", source, target, moves.forward, backward)
        self._spec, self._groups = spec, groups
        self._encoded: dict[int, tuple[list[str], list[str]]] = {}
        self.encoded(groups.ways(groups.all_axes))  # makes the groups, on every rank in the same order

    def encoded(self, batch: int) -> tuple[list[str], list[str]]:
        """The moves forward and backward, as the operator takes them."""
        if batch not in self._encoded:
            self._encoded[batch] = encode_relayout(self._step, self._spec, batch, self._groups.spot, self._groups.name)
        return self._encoded[batch]

    def __call__(self, tensor: Tensor, batch: int) -> Tensor:
        """The tensor in the other layout."""
        return collectives.relayout(tensor, *self.encoded(batch))


def outputs_only(program: Program, outputs: tuple[str, ...]) -> Program:
    """`program` cut down to what makes `outputs`: its steps, inputs, parameters and buffers that these depend on."""
    needed = set(outputs)
    steps: list[Step] = []
    for step in reversed(program.steps):
        if needed.intersection(made_by(step)):
            needed.update(read_by(step))
            steps.append(step)

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for n in names if n in needed)

    return replace(
        program, steps=tuple(reversed(steps)), outputs=outputs, inputs=kept(program.inputs),
        params=kept(program.params), buffers=kept(program.buffers), regions=(), light=False,
    )  # fmt: skip
