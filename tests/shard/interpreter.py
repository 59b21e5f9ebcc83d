"""Runs a Program step by step on the ranks of a job: the plain meaning of what the emitter turns into code."""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.graph import PARTIAL, DeviceArg, Dtype, LayerClass, Layout, Op, Ref, TensorSpec
from autopar.shard.collectives import relayout
from autopar.shard.cuts import Spot
from autopar.shard.kernels import kernel
from autopar.shard.localize import call_info, encode_recuts, encode_relayout, local_call
from autopar.shard.program import Call, Program, Relayout

Axes = tuple[int, ...]


class Mesh:
    """Groups of a mesh over all ranks of the job."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        ranks = torch.arange(prod(sizes)).reshape(sizes)
        self.place = tuple((ranks == dist.get_rank()).nonzero()[0].tolist())
        self.names: dict[Axes, str] = {}
        for count in range(1, len(sizes) + 1):
            for axes in combinations(range(len(sizes)), count):
                rest = [a for a in range(len(sizes)) if a not in axes]
                rows = ranks.permute(*rest, *axes).reshape(-1, prod(sizes[a] for a in axes)).tolist()
                group, _ = dist.new_subgroups_by_enumeration(rows)
                self.names[axes] = group.group_name

    @property
    def spot(self) -> Spot:
        """This rank's place."""
        return Spot(self.sizes, self.place)

    def shard(self, whole: Tensor, layout: Layout, spec: TensorSpec | None = None) -> Tensor:
        """This rank's shard; along partial axes the value is dealt out evenly.

        Dims that `spec` says are made of samples are cut between these.
        """
        for axis, placement in enumerate(layout):
            if placement >= 0:
                unit = max(1, spec.shape[placement].per_sample) if spec else 1
                part = -(-whole.shape[placement] // (unit * self.sizes[axis])) * unit
                parts = [*whole.split(part, placement)] if part else [whole]
                parts += [parts[0].narrow(placement, 0, 0)] * self.sizes[axis]
                whole = parts[self.place[axis]]
            elif placement == PARTIAL:
                whole = whole / self.sizes[axis]
        return whole.clone()

    def whole(self, shard: Tensor, layout: Layout) -> Tensor:
        """Inverse of `shard`, from what all ranks hold."""
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, shard)
        return self._join(held, layout, (), 0)

    def _join(self, held: list[Tensor], layout: Layout, place: tuple[int, ...], axis: int) -> Tensor:
        """Join over `axis` and inner ones first: the last axis is the innermost split."""
        if axis == len(self.sizes):
            return held[int(torch.arange(prod(self.sizes)).reshape(self.sizes)[place])]
        pieces = [self._join(held, layout, (*place, i), axis + 1) for i in range(self.sizes[axis])]
        if layout[axis] >= 0:
            return torch.cat(pieces, layout[axis])
        return torch.stack(pieces).sum(0) if layout[axis] == PARTIAL else pieces[self.place[axis]]


def run(
    program: Program, mesh: Mesh, batch: int, values: dict[str, Tensor], draw: Tensor | None = None
) -> dict[str, Tensor]:
    """All values of a program, given local inputs, parameters and buffers."""
    values = dict(values)
    for step in program.steps:
        if isinstance(step, Relayout):
            spec = program.values[step.source]
            moves = encode_relayout(step, spec, batch, mesh.spot, mesh.names.__getitem__)
            values[step.result] = relayout(values[step.source], *moves)
        else:
            values |= zip(step.op.results, _run_call(step, program, mesh, batch, values, draw), strict=True)
    return values


def _run_call(
    call: Call, program: Program, mesh: Mesh, batch: int, values: dict[str, Tensor], draw: Tensor | None
) -> tuple[Tensor, ...]:
    local = local_call(call, program, batch, mesh.place)
    recuts = encode_recuts(call, program, batch, mesh.names.__getitem__)
    names = (*call.operands, *call.op.results)
    changes = {names[r.index]: (r.forward, r.backward) for r in recuts}
    values = values | {n: relayout(values[n], *changes[n]) for n in call.operands if n in changes}
    args, kwargs = resolved(local.args, values), {k: resolved(v, values) for k, v in local.kwargs.items()}
    if call.kernel:
        info = call_info(call, program, batch, mesh.names.__getitem__, mesh.place)
        extra = {"draw": draw} if call.kernel == "dropout" else {}
        made = as_tuple(kernel(call.kernel)(info, *args, **kwargs, **extra))
    else:
        made = as_tuple(operator(local.target)(*args, **kwargs))
    return tuple(relayout(t, *changes.get(n, ((), ()))) for n, t in zip(call.op.results, made, strict=True))


def run_whole(layer: LayerClass, batch: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values of a layer on one device, by nothing but the ATen ops."""
    values = dict(values)
    for op in layer.ops:
        args = resolved(_at(op.args, batch), values)
        kwargs = {k: resolved(_at(v, batch), values) for k, v in op.kwargs}
        values |= zip(op.results, as_tuple(operator(op.target)(*args, **kwargs)), strict=True)
    return values


def _at(argument: Any, batch: int) -> Any:
    if isinstance(argument, tuple):
        return tuple(_at(a, batch) for a in argument)
    return argument.at(batch) if hasattr(argument, "at") else argument


def resolved(argument: Any, values: dict[str, Tensor]) -> Any:
    """An argument with tensors for references and torch's objects for markers."""
    match argument:
        case Ref(name):
            return values[name]
        case Dtype(name):
            return getattr(torch, name)
        case DeviceArg():
            return torch.device("cpu")
        case tuple():
            return type(argument)(resolved(a, values) for a in argument)
    return argument


def operator(target: str) -> Any:
    """The ATen overload of a qualified name."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """Results of an op as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def make_op(name: str, target: str, *args: Any, results: tuple[str, ...] = (), **kwargs: Any) -> Op:
    """An op whose string arguments are references; it makes the value of its own name unless `results` are given."""
    marked = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    made = results or (name,)
    return Op(name, target, marked, tuple(kwargs.items()), made, (None,) * len(made))
