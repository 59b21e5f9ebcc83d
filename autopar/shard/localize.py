"""What a call of a Program is on one rank: arguments with local sizes, local shapes, kernels with their groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, NamedTuple

from autopar.graph import PARTIAL, Argument, Extent, Op, Operand, OpKey, Ref, TensorSpec, axes_of
from autopar.shard.cuts import GroupName, Recut, Spot, encode_moves, recuts, seen_shape
from autopar.shard.factors import LINEAR
from autopar.shard.program import Call, Program, Relayout
from autopar.shard.relayout import gradient_layout, held_layout


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call to make: `target` as in `Op`; `Ref`s name values of the program.

    Every `Extent` has become an int; `Dtype` and `DeviceArg` are left for whoever makes the call.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Share(NamedTuple):
    """One of `size` shares of a dim: this rank's `length` elements from `first` on.

    The others are those of the ranks of `group` ('' where nobody asks).
    """

    size: int = 1
    group: str = ""
    first: int = 0
    length: int = 0


class CallInfo(NamedTuple):
    """What a kernel knows beside the op's arguments: plain literals, so that it can stand in generated code.

    `rows` is this rank's share of the factor `v`. The result is the sum over the ranks of group `parts` ('' where
    nobody asks), of whose work all is `multiple` times this rank's (inf where this one has none).
    Of the first operand: `shape` is the whole shape, `dims` the share of each dim, `batch_dim` the dim along which its
    `samples` lie (-1, 1: none). `salt` tells the ops of a layer apart.
    The result is this rank's part of a mean over so many `means`.
    """

    target: str
    rows: Share = Share()
    parts: str = ""
    multiple: float = 1.0
    shape: tuple[int, ...] = ()
    dims: tuple[Share, ...] = ()
    batch_dim: int = -1
    samples: int = 1
    salt: str = ""
    means: int = 1


SIZES_AT = {
    "view": 1, "reshape": 1, "_unsafe_view": 1, "view_copy": 1, "_reshape_copy": 1, "expand": 1, "broadcast_to": 1,
    "new_empty": 1, "new_full": 1, "new_ones": 1, "new_zeros": 1, "empty": 0, "full": 0, "ones": 0, "zeros": 0,
}  # fmt: skip
"""Ops one of whose arguments is the shape of the result, and which."""

RENAMED = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}
"""Views become reshapes: a shard that was sliced or exchanged need not be contiguous where the whole was."""


def local_call(call: Call, program: Program, batch: int, place: tuple[int, ...] = ()) -> LocalCall:
    """The ATen call that `call` is on the rank at `place` at a global microbatch of `batch` samples.

    Arguments that are sizes of the result become those of the local shard. Around the call dims may have to be recut
    (`cuts.recuts`). By default the rank is the first, whose shards are the largest.
    """
    names = iter(call.operands)
    sized = _localise_sizes(call, program, batch, place)
    args = tuple(_evaluate(a, batch, names) for a in sized.args)
    kwargs = {k: _evaluate(a, batch, names) for k, a in sized.kwargs}
    return LocalCall(RENAMED.get(sized.target, sized.target), args, kwargs)


def in_evaluation(call: Call) -> Call:
    """The call outside training: a batch norm that keeps running statistics uses them, and leaves them."""
    training_at = {"aten.batch_norm.default": 5, "aten._native_batch_norm_legit_functional.default": 5}
    at = training_at.get(call.op.target)
    if at is None or not isinstance(call.op.args[3], Ref):
        return call
    return replace(call, op=replace(call.op, args=(*call.op.args[:at], False, *call.op.args[at + 1 :])))


def op_key(call: Call, program: Program, batch: int) -> OpKey:
    """What the profiler times for `call`: the local ATen call on operands of the largest local shapes.

    A kernel is keyed as the op it stands for; what it communicates is priced apart (`rules.inner_collectives`).
    """
    local = local_call(call, program, batch)
    operands = {name: _operand(call, program, i, batch) for i, name in enumerate(call.operands)}
    args = tuple(_substitute(a, operands) for a in local.args)
    kwargs = tuple((k, _substitute(a, operands)) for k, a in local.kwargs.items())
    return OpKey(local.target, args, kwargs)


def call_info(call: Call, program: Program, batch: int, group_name: GroupName, place: tuple[int, ...] = ()) -> CallInfo:
    """What the kernel of `call` is told; `group_name` is asked only for groups over which the kernel communicates."""
    spec, layout = program.values[call.operands[0]], call.operand_layouts[0]
    by_sample = next((d for d, e in enumerate(spec.shape) if e.is_batch and not e.fixed), None)
    dims = tuple(
        _share(spec, d, axes_of(layout, d), batch, Spot(program.axis_sizes, place)) for d in range(len(spec.shape))
    )
    classes = tuple(a for a, f in enumerate(call.factors) if f == "v")
    at = {layout[a] for a in classes}
    rows, parts = dims[at.pop()] if at else Share(), partial_axes(call)
    counted = tuple(a for a in parts if a not in call.apart)
    if call.kernel in ("embedding_rows", "cross_entropy") and classes:
        rows = rows._replace(group=group_name(classes) if call.kernel == "cross_entropy" else "")
    if call.kernel == "batch_norm" and dims[0].size > 1:
        dims = (dims[0]._replace(group=group_name(axes_of(layout, 0))), *dims[1:])
    return CallInfo(
        call.op.target,
        rows,
        group_name(counted) if counted and call.kernel == "cross_entropy" else "",
        prod(_times(spec.shape[d].at(batch), dims[d].length) for d in {layout[a] for a in parts if layout[a] >= 0}),
        spec.shape_at(batch),
        dims,
        -1 if by_sample is None else by_sample,
        1 if by_sample is None else batch,
        call.op.name,
        prod(program.axis_sizes[a] for a in call.apart),
    )


def _share(spec: TensorSpec, dim: int, axes: tuple[int, ...], batch: int, spot: Spot) -> Share:
    return Share(prod(spot.sizes[a] for a in axes), "", *spot.part(spec.shape[dim], batch, axes))


def _times(whole: int, part: int) -> float:
    return whole / part if part else inf


def partial_axes(call: Call) -> tuple[int, ...]:
    """Axes over which the call itself makes its (first) result a partial sum."""
    placed = zip(call.factors, call.result_layouts[0], strict=True)
    return tuple(a for a, (factor, p) in enumerate(placed) if p == PARTIAL and factor != LINEAR)


def groups_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Sets of mesh axes, in axis order, over which the program needs process groups."""
    found: dict[tuple[int, ...], None] = {}

    def note(axes: tuple[int, ...]) -> str:
        found.setdefault(axes)
        return ""

    batch = prod(program.axis_sizes)  # that samples divide: whether other dims do, doesn't depend on the batch
    for step in program.steps:
        if isinstance(step, Relayout):
            encode_relayout(step, program.values[step.source], batch, Spot(program.axis_sizes), note)
            continue
        for recut in recuts(step, program, batch):
            note(recut.axes)
        if step.kernel:
            call_info(step, program, batch, note)
    return tuple(sorted(found))


def encode_relayout(
    step: Relayout, spec: TensorSpec, batch: int, spot: Spot, group_name: GroupName
) -> tuple[list[str], list[str]]:
    """Forward and backward moves of a change of layout of a value, as the operator takes them."""
    starts = (step.forward, held_layout(step.from_layout)), (step.backward, gradient_layout(step.to_layout))
    forward, backward = (encode_moves(m, start, spec, batch, spot, group_name) for m, start in starts)
    return forward, backward


@dataclass(frozen=True, slots=True)
class RecutTexts:
    """What recuts a tensor of a call, there (`forward` for values, `backward` for gradients), as the operator takes it.

    `index` counts the call's operands, then its results.
    """

    index: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def encode_recuts(call: Call, program: Program, batch: int, group_name: GroupName) -> list[RecutTexts]:
    """What recuts the operands of a call before it, and its results behind it."""
    by_index: dict[int, list[Recut]] = {}
    for recut in recuts(call, program, batch):
        by_index.setdefault(recut.index, []).append(recut)
    texts = []
    for index, found in by_index.items():
        to_op = index < len(call.operands)
        ways = (tuple(r.text(group_name, way) for r in found) for way in (to_op, not to_op))
        texts.append(RecutTexts(index, *ways))
    return texts


def _localise_sizes(call: Call, program: Program, batch: int, place: tuple[int, ...]) -> Op:
    """The op with the argument that gives its result's shape made local; split queries are not causal by number."""
    op = call.op
    if call.kernel == "causal_attention":
        return _with_argument(op, 5, "is_causal", False)
    name = op.target.split(".")[1] if op.target.startswith("aten.") and not op.target.endswith(".dtype") else ""
    if name not in SIZES_AT and name != "unflatten":
        return op
    local = seen_shape(call, program, len(call.operands), batch, place)
    if name == "unflatten":
        return _with_argument(op, 2, "sizes", _unflattened(op, local))
    return _with_argument(op, SIZES_AT[name], "shape" if name == "reshape" else "size", local)


def _unflattened(op: Op, local: tuple[int, ...]) -> tuple[int, ...]:
    sizes = op.args[2] if len(op.args) > 2 else dict(op.kwargs)["sizes"]
    dim = int(op.args[1]) % (len(local) - len(sizes) + 1)  # type: ignore[arg-type]
    return local[dim : dim + len(sizes)]  # type: ignore[arg-type]


def _with_argument(op: Op, position: int, name: str, value: Argument) -> Op:
    if len(op.args) > position:
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
    return replace(op, kwargs=tuple((k, value if k == name else v) for k, v in op.kwargs))


def _evaluate(argument: Any, batch: int, names: Iterator[str]) -> Any:
    """Extents at `batch`; references to the names the call reads, which come in the order of the op's operands."""
    if isinstance(argument, Extent):
        return argument.at(batch)
    if isinstance(argument, Ref):
        return Ref(next(names))
    if isinstance(argument, tuple):
        return tuple(_evaluate(a, batch, names) for a in argument)
    return argument


def _operand(call: Call, program: Program, index: int, batch: int) -> Operand:
    spec = program.values[call.operands[index]]
    return Operand(seen_shape(call, program, index, batch), spec.dtype, spec.requires_grad)


def _substitute(argument: Any, operands: dict[str, Operand]) -> Any:
    if isinstance(argument, Ref):
        return operands[argument.name]
    if isinstance(argument, tuple):
        return tuple(_substitute(a, operands) for a in argument)
    return argument
