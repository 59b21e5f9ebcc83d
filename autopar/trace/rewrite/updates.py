"""Buffers that forward changes, such as the running statistics of batch norm: their new values become results."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import TraceError
from autopar.graph import Dtype, Op, Ref, TensorSpec
from autopar.trace.flat import BUFFER, BlockCall, Flat, Item, body
from autopar.trace.layers.tails import moved, owned

BATCH_NORM = "aten.batch_norm.default"
BATCH_NORM_UPDATE = "aten._native_batch_norm_legit_functional.default"
"""(input, weight, bias, mean, variance, training, momentum, eps) -> result, two statistics of the batch, new mean, new
variance."""


def updates_statistics(op: Op) -> bool:
    """Whether the op is a batch norm that trains and keeps running statistics."""
    return op.target == BATCH_NORM and op.args[5] is True and isinstance(op.args[3], Ref)


def functional_batch_norm(op: Op, values: dict[str, TensorSpec]) -> tuple[Op, dict[str, str]]:
    """The op with the new running statistics among its results, and the result that each of the old ones becomes.

    Specs of the new results are added to `values`.
    """
    mean, variance = (a.name for a in op.args[3:5] if isinstance(a, Ref))
    added = tuple(f"{op.results[0]}_{what}" for what in ("batch_mean", "batch_std", "running_mean", "running_var"))
    values |= dict.fromkeys(added, replace(values[mean], requires_grad=False))
    results = (*op.results, *added)
    functional = replace(op, target=BATCH_NORM_UPDATE, args=op.args[:8], results=results, alias_of=(None,) * 5)
    return functional, {mean: added[2], variance: added[3]}


def with_equal_precision(op: Op, values: dict[str, TensorSpec]) -> list[Op]:
    """A batch norm whose weight and bias are cast to the dtype of its statistics, as the kernels need; else `op`."""
    statistics = op.args[3] if op.target == BATCH_NORM else None
    if not isinstance(statistics, Ref):
        return [op]
    dtype = values[statistics.name].dtype
    casts: list[Op] = []
    args = list(op.args)
    for place in (1, 2):
        given = args[place]
        if isinstance(given, Ref) and values[given.name].dtype != dtype:
            name = f"{op.results[0]}_{'weight' if place == 1 else 'bias'}"
            values[name] = replace(values[given.name], dtype=dtype)
            args[place] = Ref(name)
            casts.append(Op(name, "aten.to.dtype", (given, Dtype(dtype)), (), (name,), (None,), module=op.module))
    return [*casts, replace(op, args=tuple(args))]


def with_block_updates(flat: Flat) -> Flat:
    """Updates made inside a block are results of its call; blocks computed like it update buffers of their own."""
    own = owned(flat)
    firsts = {call.kind: call for call in flat.items if isinstance(call, BlockCall) and call.first}
    made = {kind: _made_inside(flat, call) for kind, call in firsts.items()}
    values, updates = dict(flat.values), dict(flat.updates)
    items: list[Item] = []
    for item in flat.items:
        if isinstance(item, BlockCall) and made[item.kind]:
            first, changed = firsts[item.kind], made[item.kind]
            hidden = [value for value in changed.values() if value not in first.results]
            new = {value: value if item.first else f"{value}@{item.path}" for value in hidden}
            values |= {name: values[value] for value, name in new.items()}
            item = replace(item, results=(*item.results, *new.values()))
            if not item.first:
                results = dict(zip((*first.results, *hidden), item.results, strict=True))
                theirs = {moved(b, first.path, item.path, own): results[value] for b, value in changed.items()}
                updates |= _of_its_own(theirs, changed, item)
        items.append(item)
    return replace(flat, items=tuple(items), values=values, updates=updates)


def _made_inside(flat: Flat, call: BlockCall) -> dict[str, str]:
    made = {result for op in body(flat.items, call) for result in op.results}
    return {buffer: value for buffer, value in flat.updates.items() if value in made}


def _of_its_own(theirs: dict[str, str], firsts: dict[str, str], call: BlockCall) -> dict[str, str]:
    shared = sorted(set(theirs) & set(firsts))
    if shared:
        names = ", ".join(name.removeprefix(BUFFER) for name in shared)
        raise TraceError(f"{call.path}: buffer {names} is changed by several blocks. Give each block its own.")
    return theirs
