"""Proof of a rule by trial: the op run on simulated shards, in one process, against the op run whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ConfigError
from autopar.graph import DeviceArg, Dtype, Extent, LayerClass, Layout, Op, Ref, TensorSpec
from autopar.shard.kernels import kernel
from autopar.shard.localize import call_info, local_call
from autopar.shard.notation import FIXED, REST, Line, bind, parse
from autopar.shard.program import Call, Program
from autopar.shard.relayout import gradient_layout
from autopar.shard.rules import OpRule, assignments, layouts_of
from autopar.shard.simulate import Pieces, Rank, agrees, distribute, ranks, shard_of
from autopar.trace.run import overload

ROUNDING = 1e4
"""Largest difference allowed, in roundings (of the coarsest dtype) of the largest element: 2e-12 in float64."""

MESHES = ((2,), (3,), (2, 2), (2, 3))
"""Meshes on which a registered rule is tried."""
LENGTHS = (12, 7)
"""How many of each factor there are: what all meshes divide, and what none does, so that some ranks have nothing."""


def check_rule(target: str, line: str, example: Sequence[Any] | None = None) -> None:
    """Try a one-line rule on every mesh of MESHES and every assignment, results and gradients.

    `example` is the arguments to call the op with; without it each operand is a random float64 tensor, as long as
    LENGTHS says in every factor and 3 in every `_`. Raises ConfigError when the op can't be run or a sharded run
    differs.
    """
    parsed = parse(line)
    calls = [_operands_for(parsed, length) for length in LENGTHS] if example is None else [tuple(example)]
    for arguments in calls:
        _check_call(target, line, parsed, arguments)


def _check_call(target: str, line: str, parsed: Line, arguments: tuple[Any, ...]) -> None:
    op, layer, tensors = capture(target.replace("::", "."), arguments)
    rule = bind(parsed, tuple(layer.values[n] for n in op.operands), tuple(layer.values[n] for n in op.results))
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
    if rule is None:
        raise ConfigError(f"{target}: rule {line!r} has no place for operands of shapes {shapes}. Add terms or dims.")
    for sizes in MESHES:
        for factors in assignments(rule, op, layer, sizes, 1):
            try:
                faults = differences(rule, op, layer, tensors, sizes, factors)
            except RuntimeError as error:
                raise ConfigError(
                    f"{target} can't be differentiated ({error}). Register its gradient first."
                ) from error
            if faults:
                raise ConfigError(
                    f"{target}: rule {line!r} is wrong: with factors {factors} split over axes of sizes {sizes} the "
                    f"sharded op, on operands of shapes {shapes}, differs from the whole one in {', '.join(faults)}. "
                    "Write '_' for dims it can't split, and '| name!' where it can't run on nothing."
                )


def _operands_for(line: Line, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    lengths = {FIXED: (3,), REST: (length, length)}
    shapes = ([n for dim in term for n in lengths.get(dim, (length,))] for term in line.operands)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def capture(
    target: str, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None
) -> tuple[Op, LayerClass, list[Tensor]]:
    """An op called with `arguments` as a layer of its own, and its tensor operands in order.

    Raises ConfigError when there is no such op or the call fails.
    """
    name = target if target.count(".") == 2 else f"{target}.default"
    tensors: list[Tensor] = []
    op_arguments = tuple(_record(a, tensors) for a in arguments)
    op_keywords = tuple((k, _record(v, tensors)) for k, v in (keywords or {}).items())
    try:
        made = _as_tuple(overload(name)(*arguments, **(keywords or {})))
    except Exception as error:
        raise ConfigError(f"{name} can't be called with {op_arguments}: {error}. Give an example call.") from error
    results = tuple(f"r{i}" for i in range(len(made)))
    op = Op(name, name, op_arguments, op_keywords, results, (None,) * len(made))
    values = {f"x{i}": _spec(t, _flows(t)) for i, t in enumerate(tensors)}
    flows = any(spec.requires_grad for spec in values.values())
    values |= {r: _spec(t, flows and _flows(t)) for r, t in zip(results, made, strict=True)}
    return op, LayerClass(tuple(op.operands), (), (), (op,), results, values), tensors


def _record(argument: Any, tensors: list[Tensor]) -> Any:
    """The argument as a graph has it; tensors are appended to `tensors`."""
    if isinstance(argument, Tensor):
        tensors.append(argument)
        return Ref(f"x{len(tensors) - 1}")
    if isinstance(argument, list | tuple):
        return tuple(_record(a, tensors) for a in argument)
    return Dtype(str(argument).removeprefix("torch.")) if isinstance(argument, torch.dtype) else argument


def _flows(tensor: Tensor) -> bool:
    """Whether a gradient may flow to it."""
    return tensor.is_floating_point() or tensor.is_complex()


def _spec(tensor: Tensor, requires_grad: bool) -> TensorSpec:
    shape = tuple(Extent(0, n) for n in tensor.shape)
    return TensorSpec(shape, str(tensor.dtype).removeprefix("torch."), requires_grad)


def differences(
    rule: OpRule, op: Op, layer: LayerClass, operands: Sequence[Tensor], axis_sizes: tuple[int, ...],
    factors: tuple[str, ...], batch: int = 1,
) -> list[str]:  # fmt: skip
    """What comes out otherwise when the op runs on shards (results, gradients); empty when the rule is right.

    `operands` are whole tensors, one for each of `op.operands`. Every rank of the mesh runs the op on its shards with
    local sizes; what the ranks then hold is compared with what the layouts say of the whole. Shards are whole pieces of
    each factor: what recuts them (`cuts.py`) isn't part of it.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = [layer.values[r].shape_at(batch) for r in op.results]
    seeds = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    once = _Trial(op, layer, (), ((),) * len(operands), ((),) * len(shapes), (), batch)
    expected = once.outcome((), operands, seeds, rule)

    layouts, result_layouts = layouts_of(rule, op, layer, factors)
    trial = _Trial(op, layer, axis_sizes, layouts, result_layouts, factors, batch)
    cut = _pieces(rule, op, layer, batch)
    given = zip(operands, cut, layouts, strict=False)
    held = [distribute(t, pieces, lay, axis_sizes, generator) for t, pieces, lay in given]
    got: dict[Rank, dict[str, Tensor]] = {}
    for rank in ranks(axis_sizes):
        wanted = zip(seeds, cut[len(operands) :], result_layouts, strict=True)
        local_seeds = [shard_of(seed, pieces, lay, axis_sizes, rank) for seed, pieces, lay in wanted]
        try:
            got[rank] = trial.outcome(rank, [h[rank] for h in held], local_seeds, rule)
        except RuntimeError as error:  # shards that don't fit together, or results of another shape
            return [f"what it can run on ({error})"]
    lies, tolerance = trial.layouts(), ROUNDING * max(_precision(op, layer), default=0.0)
    of = dict(zip(lies, (*cut[len(operands) :], *cut), strict=False))
    return [
        name for name, whole in expected.items()
        if not agrees({r: o[name] for r, o in got.items()}, whole, of[name], lies[name], axis_sizes, tolerance)
    ]  # fmt: skip


def _pieces(rule: OpRule, op: Op, layer: LayerClass, batch: int) -> list[Pieces]:
    """What each operand, then each result, may be cut into."""
    specs = [layer.values[name] for name in (*op.operands, *op.results)]
    grains = rule.grains or [[1] * len(spec.shape) for spec in specs]
    return [
        Pieces(tuple(Extent(e.per_sample // g, e.fixed // g) for e, g in zip(spec.shape, own, strict=True)), batch)
        for spec, own in zip(specs, grains, strict=True)
    ]


def _precision(op: Op, layer: LayerClass) -> Iterator[float]:
    for name in (*op.operands, *op.results):
        dtype = getattr(torch, layer.values[name].dtype)
        if dtype.is_floating_point or dtype.is_complex:
            yield torch.finfo(dtype).eps


@dataclass(frozen=True)
class _Trial:
    """One op under one choice of factors."""

    op: Op
    layer: LayerClass
    axis_sizes: tuple[int, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    factors: tuple[str, ...]
    batch: int

    def layouts(self) -> dict[str, Layout]:
        """Layouts of all parts of an outcome."""
        found = {f"result {i}": layout for i, layout in enumerate(self.result_layouts)}
        return found | {f"gradient of operand {i}": gradient_layout(lay) for i, lay in enumerate(self.operand_layouts)}

    def outcome(
        self, rank: Rank, operands: Sequence[Tensor], seeds: Sequence[Tensor], rule: OpRule
    ) -> dict[str, Tensor]:
        """One rank's results, and its operands' gradients for the results' gradients `seeds`."""
        flows = [self.layer.values[name].requires_grad for name in self.op.operands]
        leaves = [t.detach().requires_grad_(f) for t, f in zip(operands, flows, strict=True)]
        results = self._run(rank, leaves, rule)
        found = {f"result {i}": t.detach() for i, t in enumerate(results)}
        ends = [(t, s.to(t.dtype)) for t, s in zip(results, seeds, strict=True) if t.requires_grad]
        wanted = [(i, t) for i, t in enumerate(leaves) if t.requires_grad]
        if ends and wanted:
            roots, root_seeds = zip(*ends, strict=True)
            inputs = [t for _, t in wanted]
            gradients = torch.autograd.grad(roots, inputs, root_seeds, allow_unused=True, materialize_grads=True)
            found |= {f"gradient of operand {i}": g for (i, _), g in zip(wanted, gradients, strict=True)}
        return found

    def _run(self, rank: Rank, leaves: Sequence[Tensor], rule: OpRule) -> tuple[Tensor, ...]:
        names = tuple(f"operand {i}" for i in range(len(leaves)))
        layouts = dict(zip((*names, *self.op.results), (*self.operand_layouts, *self.result_layouts), strict=True))
        specs = {n: self.layer.values[o] for n, o in zip(names, self.op.operands, strict=True)}
        values = specs | {r: self.layer.values[r] for r in self.op.results}
        name = rule.kernel(self.factors) if self.axis_sizes else ""
        call = Call(self.op, names, self.operand_layouts, self.result_layouts, self.factors, name, rule.grains)
        program = Program(self.axis_sizes, (call,), names, (), (), self.op.results, layouts, values)
        local = local_call(call, program, self.batch, rank)
        function = overload(local.target)
        if name:
            info = call_info(call, program, self.batch, lambda axes: str(axes), rank)
            function = functools.partial(kernel(name), info)
        held = dict(zip(names, leaves, strict=True))
        arguments = [_value(a, held) for a in local.args]
        return _as_tuple(function(*arguments, **{k: _value(v, held) for k, v in local.kwargs.items()}))


def _value(argument: Any, held: Mapping[str, Tensor]) -> Any:
    if isinstance(argument, Ref):
        return held[argument.name]
    if isinstance(argument, tuple):
        return [_value(a, held) for a in argument]
    if isinstance(argument, Dtype):
        return getattr(torch, argument.name)
    return torch.device("cpu") if isinstance(argument, DeviceArg) else argument


def _as_tuple(made: Any) -> tuple[Tensor, ...]:
    return tuple(made) if isinstance(made, list | tuple) else (made,)
