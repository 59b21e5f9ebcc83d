"""Clean-up of the captured list: functional, explicit sizes, no no-ops, no dead code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from autopar.errors import TraceError
from autopar.graph import Argument, DeviceArg, Dtype, Extent, Op, Ref, TensorSpec
from autopar.trace.flat import BUFFER, PARAM, BlockCall, Flat, Item, body, rename_item, renamed_ends
from autopar.trace.rewrite.updates import (
    functional_batch_norm,
    updates_statistics,
    with_block_updates,
    with_equal_precision,
)
from autopar.trace.rewrite.writes import Writes

_SHAPED = {"aten.view.default", "aten.reshape.default", "aten.expand.default", "aten._unsafe_view.default"}
_CONVERSIONS = {
    "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy.default", "aten.type_as.default",
}  # fmt: skip
_LIKE_ANOTHER = {
    "aten.expand_as.default": "aten.expand.default", "aten.view_as.default": "aten.view.default",
    "aten.reshape_as.default": "aten.reshape.default",
}  # fmt: skip
"""Views of the shape of another tensor, and those of a given shape in their place."""
_REPEATS = {"aten.repeat.default", "aten.tile.default", "aten.repeat_interleave.self_int"}
"""Ops that set copies side by side; of dims of size 1 that is what `expand` does, which can be split along them."""
_NEW = {
    "aten.new_full.default": None,
    "aten.new_ones.default": 1,
    "aten.new_zeros.default": 0,
    "aten.new_empty.default": 0,
}
"""Ops that take nothing but the dtype from their operand, and what they fill a tensor with (None: an argument)."""
_DRAWN_LIKE = {"aten.randn_like.default": "aten.randn.default", "aten.rand_like.default": "aten.rand.default"}
"""Ops that draw a tensor of another's shape, and those of a given shape in their place."""
_ALIASES = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg", "absolute": "abs",
    "clip": "clamp", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "arctan": "atan", "arctan2": "atan2", "fix": "trunc", "moveaxis": "movedim", "swapaxes": "transpose",
    "swapdims": "transpose", "numpy_T": "t", "concat": "cat", "concatenate": "cat",
}  # fmt: skip
"""Operators that are others by another name (`numpy_T` of matrices: its other uses are deprecated)."""
_IDENTITY = {
    *_SHAPED, "aten.to.dtype",
    "aten.contiguous.default", "aten.slice.Tensor", "aten.alias.default", "aten.dropout.default", "aten.detach.default",
    "aten.flatten.using_ints", "aten.lift_fresh_copy.default", "aten.feature_dropout.default",
}  # fmt: skip


def explicit_sizes(flat: Flat) -> Flat:
    """Sizes of views in full (no -1), ends of slices no larger than the dim."""
    return replace(flat, items=tuple(new for item in flat.items for new in _explicit(item, flat.values)))


def _explicit(item: Item, values: dict[str, TensorSpec]) -> list[Item]:
    if not isinstance(item, Op):
        return [item]
    namespace, name, variant = item.target.split(".")
    op = replace(item, target=f"{namespace}.{_ALIASES.get(name, name)}.{variant}")
    if op.target in _SHAPED:
        return [replace(op, args=(op.args[0], _shape(values[op.results[0]]), *op.args[2:]))]
    if op.target in _LIKE_ANOTHER:
        return [replace(op, target=_LIKE_ANOTHER[op.target], args=(op.args[0], _shape(values[op.results[0]])))]
    if op.target == "aten.slice.Tensor":
        return [_explicit_end(op, values)]
    if op.target in _CONVERSIONS:  # everything lives on one device: only the dtype can change
        dtype = Dtype(values[op.results[0]].dtype)
        return [replace(op, target="aten.to.dtype", args=(op.args[0], dtype), kwargs=())]
    if op.target in _DRAWN_LIKE:
        spec = values[op.results[0]]
        kwargs = (("dtype", Dtype(spec.dtype)), ("device", DeviceArg()))
        return [replace(op, target=_DRAWN_LIKE[op.target], args=(_shape(spec),), kwargs=kwargs)]
    if op.target in _NEW:
        spec, filling = values[op.results[0]], op.args[2] if op.target == "aten.new_full.default" else _NEW[op.target]
        kwargs = (("dtype", Dtype(spec.dtype)), ("device", DeviceArg()))
        return [replace(op, target="aten.full.default", args=(_shape(spec), filling), kwargs=kwargs)]
    if op.target == "aten.cat.default":
        return [_without_nothing(op, values)]
    if op.target in _REPEATS and _broadcasts(values[op.operands[0]], values[op.results[0]]):
        return [_expand(op, 0, values[op.results[0]])]
    if op.target == "aten.broadcast_tensors.default":
        return [_expand(op, i, values[result]) for i, result in enumerate(op.results)]
    return [op]


def _without_nothing(op: Op, values: dict[str, TensorSpec]) -> Op:
    """A join without tensors of shape (0,), which are joined to any other (an empty cache)."""
    kept = tuple(Ref(n) for n in op.operands if values[n].shape != (Extent(0, 0),))
    return replace(op, args=(kept or op.args[0], *op.args[1:]))


def _explicit_end(op: Op, values: dict[str, TensorSpec]) -> Op:
    dim, end = op.args[1], op.args[3] if len(op.args) > 3 else None
    whole = values[op.operands[0]].shape[dim if isinstance(dim, int) else 0]
    if end is None or end == 2**63 - 1 or (isinstance(end, int) and not whole.is_batch and end > whole.fixed):
        return replace(op, args=(*op.args[:3], _size(whole), *op.args[4:]))
    return op


def _broadcasts(before: TensorSpec, after: TensorSpec) -> bool:
    """Whether only dims of size 1 change, or come in front."""
    same = [b in (a, Extent(0, 1)) for b, a in zip(reversed(before.shape), reversed(after.shape), strict=False)]
    return len(after.shape) >= len(before.shape) and all(same)


def _expand(op: Op, i: int, spec: TensorSpec) -> Op:
    result = op.results[i]
    return replace(
        op,
        name=result,
        target="aten.expand.default",
        args=(Ref(op.operands[i]), _shape(spec)),
        kwargs=(),
        results=(result,),
        alias_of=(None,),
    )


def _shape(spec: TensorSpec) -> tuple[Argument, ...]:
    return tuple(map(_size, spec.shape))


def _size(e: Extent) -> Argument:
    return e if e.is_batch else e.fixed


def functional(flat: Flat) -> Flat:
    """In-place ops made functional: later readers of a changed value read the result; `updates` has changed buffers.

    Raises TraceError where a parameter is written, or something through what may or may not be a view.
    """
    names: dict[str, str] = {}
    items: list[Item] = []
    values = dict(flat.values)
    writes = Writes(flat.items, values)
    for position, original in enumerate(flat.items):
        item = rename_item(original, names)
        if isinstance(item, Op):
            *casts, item = with_equal_precision(item, values)
            items += casts
        if isinstance(item, Op) and updates_statistics(item):
            item, changed = functional_batch_norm(item, values)
            names = _now_read(names, changed)
        elif isinstance(item, Op) and isinstance(original, Op) and (plain := _functional_target(item.target)):
            source, written = item.args[0], original.args[0]
            if not isinstance(source, Ref) or not isinstance(written, Ref):
                raise TraceError(f"{item.module}: {item.target} changes {source!r} in place. Write it out of place.")
            if not _exists(plain):
                raise TraceError(
                    f"{item.module or 'the model'}: {item.target} changes a tensor in place and has no form that makes "
                    "a new one. Write the change without an in-place operator (for example torch.where)."
                )
            *casts, item = _copied(item, values) if plain == COPY else [_out_of_place(item, plain)]
            items += casts
            names = _now_read(names, {source.name: item.results[0]})
            items += [item, *writes.after(item, written.name, position, names)]
            continue
        elif isinstance(original, Op):
            writes.note(original)
        items.append(item)
    if held := [name.removeprefix(PARAM) for name in names if name.startswith(PARAM)]:
        raise TraceError(
            f"forward changes parameters ({', '.join(held[:3])}), which a plan keeps for the whole step. "
            "Change them between steps, or compute with a changed copy."
        )
    updates = {buffer: value for buffer, value in names.items() if buffer.startswith(BUFFER)}
    flat = replace(renamed_ends(flat, tuple(items), names), values=values)
    return with_block_updates(replace(flat, updates=updates))


COPY = "aten.copy.default"
_FUNCTIONAL = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}
"""In-place operators whose functional form has another name."""


def _out_of_place(op: Op, target: str) -> Op:
    """The functional form; that of `bernoulli_` has no default for the probability."""
    missing = target == "aten.bernoulli.p" and len(op.args) == 1 and "p" not in dict(op.kwargs)
    return replace(op, target=target, args=(*op.args, 0.5) if missing else op.args)


def _copied(op: Op, values: dict[str, TensorSpec]) -> list[Op]:
    """What `copy_` leaves in its first operand, as ops with a derivative: the second, cast and broadcast."""
    after, source = values[op.results[0]], op.operands[1]
    cast = f"{op.results[0]}@cast"
    values[cast] = replace(values[source], dtype=after.dtype)
    to = Op(cast, "aten.to.dtype", (Ref(source), Dtype(after.dtype)), (), (cast,), (None,), module=op.module)
    return [to, replace(op, target="aten.expand.default", args=(Ref(cast), _shape(after)), kwargs=())]


def _exists(target: str) -> bool:
    """Whether torch has an operator of the name."""
    namespace, name, variant = target.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), variant)


def _now_read(names: dict[str, str], changed: dict[str, str]) -> dict[str, str]:
    """`names` with the results of a change in place of what was changed."""
    return {k: changed.get(v, v) for k, v in names.items()} | changed


def _functional_target(target: str) -> str | None:
    namespace, name, variant = target.split(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    return _FUNCTIONAL.get(target, f"{namespace}.{name[:-1]}.{variant}")


def without_no_ops(flat: Flat) -> Flat:
    """Drop ops whose result is their operand: same shape and dtype, nothing computed. Needs aliases (`annotate`)."""
    names: dict[str, str] = {}
    items: list[Item] = []
    for item in flat.items:
        item = rename_item(item, names)
        if isinstance(item, Op) and _is_no_op(item, flat.values):
            names[item.results[0]] = item.operands[0]
        else:
            items.append(item)
    return renamed_ends(flat, tuple(items), names)


def _is_no_op(op: Op, values: dict[str, TensorSpec]) -> bool:
    if op.target not in _IDENTITY or len(op.results) != 1 or not op.operands:
        return False
    before, after = values[op.operands[0]], values[op.results[0]]
    if before != after:  # detach of something with a gradient differs in requires_grad
        return False
    return (op.target == "aten.dropout.default" and (op.args[1] == 0 or op.args[2] is False)) or op.alias_of[
        0
    ] is not None


def without_dead_code(flat: Flat) -> Flat:
    """Drop what no output depends on, and arguments and results of block calls that no block of the kind needs."""
    needed_inputs = {c.kind: set(range(len(c.inputs))) for c in _calls(flat.items)}
    while True:
        live, results, inputs = _live(flat, needed_inputs)
        if inputs == needed_inputs:
            break
        needed_inputs = inputs
    items = [_prune(i, results, inputs) for i in flat.items if live(i)]
    kept = {*flat.inputs, *flat.outputs, *flat.updates.values(), *(n for i in items for n in (*_reads(i), *i.results))}
    values = {n: s for n, s in flat.values.items() if n in kept or ":" in n}
    return replace(flat, items=tuple(items), values=values)


def _calls(items: Iterable[Item]) -> list[BlockCall]:
    return [i for i in items if isinstance(i, BlockCall)]


def _reads(item: Item) -> tuple[str, ...]:
    return item.operands if isinstance(item, Op) else item.inputs


def _live(flat: Flat, needed: dict[int, set[int]]):  # type: ignore[no-untyped-def]
    """One backward sweep: a test of items, and the results and inputs each kind of block needs."""
    read = {*flat.outputs, *flat.updates.values()} | ({flat.loss} if flat.loss else set())
    results: dict[int, set[int]] = {kind: set() for kind in needed}
    first = {c.kind: c for c in _calls(flat.items) if c.first}
    used: dict[int, bool] = dict.fromkeys(needed, False)
    kept: set[int] = set()
    for item in reversed(flat.items):
        if isinstance(item, BlockCall):
            results[item.kind] |= {i for i, r in enumerate(item.results) if r in read}
            alive = bool(read & set(item.results)) or (item.first and used[item.kind])
            used[item.kind] |= alive
            if alive and item.first:
                read |= {item.results[i] for i in results[item.kind]}
            elif alive:
                read |= {item.inputs[i] for i in needed[item.kind]}
        else:
            alive = any(r in read for r in item.results)
            if alive:
                read |= set(item.operands)
        if alive:
            kept.add(id(item))
    inputs = {k: {i for i, n in enumerate(first[k].inputs) if n in _body_reads(flat, first[k], kept)} for k in needed}
    return (lambda item: id(item) in kept), results, inputs


def _body_reads(flat: Flat, call: BlockCall, kept: set[int]) -> set[str]:
    return {n for op in body(flat.items, call) if id(op) in kept for n in op.operands}


def _prune(item: Item, results: dict[int, set[int]], inputs: dict[int, set[int]]) -> Item:
    if isinstance(item, Op):
        return item
    return replace(
        item,
        inputs=tuple(n for i, n in enumerate(item.inputs) if i in inputs[item.kind]),
        results=tuple(n for i, n in enumerate(item.results) if i in results[item.kind]),
    )
