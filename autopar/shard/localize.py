"""What a call of a Program is on one rank: arguments with local sizes, local shapes, kernels with their groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

from autopar.errors import PlanError
from autopar.graph import (
    PARTIAL,
    Argument,
    Extent,
    Layout,
    Op,
    Operand,
    OpKey,
    Ref,
    layout_text,
)
from autopar.shard.factors import LINEAR
from autopar.shard.program import Call, Move, Program, Relayout

GroupName: TypeAlias = Callable[[tuple[int, ...]], str]
"""Name of the process group over some mesh axes (in axis order): ranks that differ on these axes only, row-major."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call to make: `target` as in `Op`; `Ref`s name values of the program.

    Every `Extent` has become an int; `Dtype` and `DeviceArg` are left for whoever makes the call.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Share(NamedTuple):
    """One of `size` equal shares, which one being told by this rank's place in `group` ('' where nobody asks)."""

    size: int = 1
    group: str = ""


class CallInfo(NamedTuple):
    """What a kernel knows beside the op's arguments: plain literals, so that it can stand in generated code.

    `rows` is this rank's share of the factor `v`. `parts` says of how many equal work shares the result is the sum.
    Of the first operand: `shape` is the whole shape, `dims` the share of each dim, `batch_dim` the dim along which its
    `samples` lie (-1, 1: none). `salt` tells the ops of a layer apart.
    """

    target: str
    rows: Share = Share()
    parts: Share = Share()
    shape: tuple[int, ...] = ()
    dims: tuple[Share, ...] = ()
    batch_dim: int = -1
    samples: int = 1
    salt: str = ""


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


def local_call(call: Call, program: Program, batch: int) -> LocalCall:
    """The ATen call that `call` is on one rank at a global microbatch of `batch` samples.

    Arguments that are sizes of the result become those of the local shard. Raises PlanError where a dim does not
    divide by the ranks that split it.
    """
    names = iter(call.operands)
    sized = _localise_sizes(call, program, batch)
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
    """What the profiler times for `call`: the local ATen call on operands of the local shapes.

    A kernel is keyed as the op it stands for; what it communicates is priced apart (`rules.inner_collectives`).
    """
    local = local_call(call, program, batch)
    operands = {name: _operand(program, name, batch) for name in call.operands}
    args = tuple(_substitute(a, operands) for a in local.args)
    kwargs = tuple((k, _substitute(a, operands)) for k, a in local.kwargs.items())
    return OpKey(local.target, args, kwargs)


def shard_shape(shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Shape of every rank's shard; raises PlanError naming `what` where a dim does not divide evenly."""
    local = list(shape)
    for placement, size in zip(layout, axis_sizes, strict=True):
        if placement < 0:
            continue
        if local[placement] % size:
            raise PlanError(
                f"{what}: shape {shape} can't be laid out {layout_text(layout)!r} over axes of sizes {axis_sizes}: "
                f"dim {placement} does not divide evenly. Choose a batch or degrees that divide it."
            )
        local[placement] //= size
    return tuple(local)


def local_shape_of(program: Program, name: str, batch: int) -> tuple[int, ...]:
    """Local shape of a value of the program."""
    return shard_shape(program.values[name].shape_at(batch), program.layouts[name], program.axis_sizes, name)


def call_info(call: Call, program: Program, batch: int, group_name: GroupName) -> CallInfo:
    """What the kernel of `call` is told; `group_name` is asked only for groups that the kernel uses."""
    spec, layout = program.values[call.operands[0]], call.operand_layouts[0]
    by_sample = next((d for d, e in enumerate(spec.shape) if e.is_batch and not e.fixed), None)

    def share(axes: tuple[int, ...], used: bool) -> Share:
        return Share(prod(program.axis_sizes[a] for a in axes), group_name(axes) if axes and used else "")

    asked = {"dropout": len(spec.shape), "batch_norm": 1}.get(call.kernel, 0)
    dims = tuple(_axes_where(layout, d) for d in range(len(spec.shape)))
    return CallInfo(
        call.op.target,
        share(_axes_where(call.factors, "v"), call.kernel in ("embedding_rows", "cross_entropy")),
        share(partial_axes(call), call.kernel == "cross_entropy"),
        spec.shape_at(batch),
        tuple(share(axes, d < asked) for d, axes in enumerate(dims)),
        -1 if by_sample is None else by_sample,
        1 if by_sample is None else batch,
        call.op.name,
    )


def _axes_where(placements: tuple[Any, ...], wanted: Any) -> tuple[int, ...]:
    return tuple(a for a, p in enumerate(placements) if p == wanted)


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

    for step in program.steps:
        if isinstance(step, Relayout):
            encode_moves(step.forward + step.backward, program.axis_sizes, note)
        elif step.kernel:
            call_info(step, program, 1, note)
    return tuple(sorted(found))


def encode_moves(moves: tuple[Move, ...], axis_sizes: tuple[int, ...], group_name: GroupName) -> list[str]:
    """Moves as the operator `autopar::relayout` takes them: `kind dim to_dim size group`, one text a move."""
    return [f"{m.kind} {m.dim} {m.to_dim} {prod(axis_sizes[a] for a in m.axes)} {group_name(m.axes)}" for m in moves]


def _localise_sizes(call: Call, program: Program, batch: int) -> Op:
    """The op with the argument that gives its result's shape made local."""
    op = call.op
    name = op.target.split(".")[1] if op.target.startswith("aten.") and not op.target.endswith(".dtype") else ""
    if name not in SIZES_AT and name != "unflatten":
        return op
    whole = program.values[op.results[0]].shape_at(batch)
    local = shard_shape(whole, call.result_layouts[0], program.axis_sizes, f"op {op.name} ({op.target})")
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


def _operand(program: Program, name: str, batch: int) -> Operand:
    spec = program.values[name]
    return Operand(local_shape_of(program, name, batch), spec.dtype, spec.requires_grad)


def _substitute(argument: Any, operands: dict[str, Operand]) -> Any:
    if isinstance(argument, Ref):
        return operands[argument.name]
    if isinstance(argument, tuple):
        return tuple(_substitute(a, operands) for a in argument)
    return argument
