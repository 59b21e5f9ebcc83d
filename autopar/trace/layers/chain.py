"""From a flat list of operators to layers, layer classes and cuts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.graph import Cut, Extent, Layer, LayerClass, Op, OpGraph, TensorSpec
from autopar.trace.flat import BUFFER, INPUT, PARAM, Flat, in_module, rename
from autopar.trace.layers.copies import last_reader, with_copies
from autopar.trace.layers.segments import Segment, segments
from autopar.trace.layers.tails import Owned, moved, owned, with_tails

_BATCH = 8
"""Batch at which sizes of values are compared to choose the main value of a cut."""


@dataclass(frozen=True)
class _Use:
    """A layer over flat names: what its class's inputs, outputs, parameters and buffers are there."""

    name: str
    layer_class: LayerClass
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]


def cut_into_layers(flat: Flat) -> OpGraph:
    """Layers, classes (found by digest) and cuts of `flat`; names become local to layers or the model's own."""
    own = owned(flat)
    flat, parts = with_copies(*with_tails(flat, segments(flat), own))
    uses = _uses(flat, parts, own)
    names = _public_names(flat, uses)
    classes: dict[str, LayerClass] = {}
    for use in uses:
        classes.setdefault(use.layer_class.digest, use.layer_class)
    index = {digest: i for i, digest in enumerate(classes)}
    layers = tuple(
        Layer(
            use.name, index[use.layer_class.digest], _all(names, use.inputs), _all(names, use.outputs),
            tuple(p.removeprefix(PARAM) for p in use.params), tuple(b.removeprefix(BUFFER) for b in use.buffers),
        )
        for use in uses
    )  # fmt: skip
    values = {names[n]: flat.values[n] for n in names}
    outputs = _all(names, flat.outputs)
    inputs = _all(names, flat.inputs)
    return OpGraph(
        classes=tuple(classes.values()),
        layers=layers,
        cuts=_cuts(layers, inputs, outputs, values),
        inputs=inputs,
        values=values,
        params=flat.params,
        buffers=flat.buffers,
        aliases=flat.aliases,
        updates={buffer.removeprefix(BUFFER): names[value] for buffer, value in flat.updates.items()},
        loss=names[flat.loss] if flat.loss else None,
        outputs=outputs,
        token_dim=_token_dim(inputs, values),
        assumptions=flat.assumptions,
    )


def _all(names: dict[str, str], wanted: Iterable[str]) -> tuple[str, ...]:
    return tuple(names[n] for n in wanted)


# --- one layer ---------------------------------------------------------------------------------------------------


def _uses(flat: Flat, parts: list[Segment], own: Owned) -> list[_Use]:
    """The layer of every segment; blocks that stand for another reuse its class."""
    read_by = last_reader(flat, parts)
    firsts: dict[int, _Use] = {}
    uses: list[_Use] = []
    for i, part in enumerate(parts):
        if part.call and not part.call.first:
            uses.append(_repeat(firsts[part.call.kind], part, parts, own))
            continue
        use = _layer(flat, part, i, read_by, own, _unique(_layer_name(part), uses))
        if part.call:
            firsts[part.call.kind] = use
        uses.append(use)
    return uses


def _layer(flat: Flat, part: Segment, index: int, read_by: dict[str, int], own: Owned, name: str) -> _Use:
    made = {r for op in part.ops for r in op.results}
    read = dict.fromkeys(n for op in part.ops for n in op.operands if n not in made)
    params = tuple(n for n in read if n.startswith(PARAM))
    buffers = tuple(n for n in read if n.startswith(BUFFER))
    external = [n for n in read if n not in params and n not in buffers]
    if part.call:
        inputs = tuple(dict.fromkeys([*(n for n in part.call.inputs if n in external), *external]))
        outputs = tuple(dict.fromkeys(part.call.results))
    else:
        inputs = tuple(external)
        outputs = tuple(r for op in part.ops for r in op.results if read_by.get(r, -1) > index)
    prefix = part.path or _common_module([own.names[n][0] for n in (*params, *buffers)])
    names = _local_names(part.ops, inputs, params, buffers, prefix, own)
    ops = tuple(replace(rename(op, names), name=names[op.results[0]] if op.results else op.name) for op in part.ops)
    layer_class = LayerClass(
        inputs=_all(names, inputs), params=_all(names, params), buffers=_all(names, buffers), ops=ops,
        outputs=_all(names, outputs), values={local: flat.values[n] for n, local in names.items()},
    )  # fmt: skip
    return _Use(name, layer_class, inputs, outputs, params, buffers)


def _repeat(first: _Use, part: Segment, parts: list[Segment], own: Owned) -> _Use:
    """The layer of a block that is computed like `first`, with its own arguments and parameters."""
    call = part.call
    original = next(p.call for p in parts if p.call and call and p.call.kind == call.kind and p.call.first)
    if call is None or original is None:
        raise ValueError("a repeated block needs its first")
    given = dict(zip(original.inputs, call.inputs, strict=True))
    made = dict(zip(original.results, call.results, strict=True))
    return _Use(
        call.path,
        first.layer_class,
        tuple(given.get(n, n) for n in first.inputs),
        tuple(made[n] for n in first.outputs),
        tuple(moved(p, original.path, call.path, own) for p in first.params),
        tuple(moved(b, original.path, call.path, own) for b in first.buffers),
    )


def _local_names(
    ops: tuple[Op, ...], inputs: tuple[str, ...], params: tuple[str, ...], buffers: tuple[str, ...], prefix: str,
    own: Owned,
) -> dict[str, str]:  # fmt: skip
    """Readable names that do not depend on where in the model the layer stands."""
    names = {n: f"in{i}" for i, n in enumerate(inputs)}
    for n in (*params, *buffers):
        inside = next((o for o in own.names[n] if prefix and o.startswith(f"{prefix}.")), None)
        names[n] = own.names[n][0] if inside is None else inside.removeprefix(f"{prefix}.")
    taken = set(names.values())
    alone = Counter(op.module for op in ops)
    for op in ops:
        base = _op_name(op, prefix, alone[op.module] == 1)
        for result in op.results:
            names[result] = _free(base, taken)
            taken.add(names[result])
    return names


def _free(base: str, taken: set[str]) -> str:
    return base if base not in taken else next(n for i in itertools.count(1) if (n := f"{base}_{i}") not in taken)


def _op_name(op: Op, prefix: str, alone: bool) -> str:
    """The module's path inside the layer and the operator: `self_attn_transpose`; a module's only op has its name."""
    operator = op.target.split(".")[1].strip("_")
    inside = op.module[len(prefix) :].strip(".").replace(".", "_") if prefix and in_module(op, prefix) else ""
    if not inside:
        return operator
    if inside[0].isdigit():
        return f"{operator}_{inside}"
    return inside if alone else f"{inside}_{operator}"


def _common_module(names: list[str]) -> str:
    """Longest dotted path that all parameters' modules share."""
    modules = [n.rpartition(".")[0].split(".") for n in names]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in shared)


def _layer_name(part: Segment) -> str:
    """The block's path, or the modules in which the stretch reads parameters, or the first module in it."""
    if part.path:
        return part.path
    readers = dict.fromkeys(op.module or "model" for op in part.ops if any(n.startswith(PARAM) for n in op.operands))
    named = list(readers) or [part.ops[0].module or part.ops[-1].target.split(".")[1]]
    return "+".join(named[:3]) + ("+..." if len(named) > 3 else "")


def _unique(name: str, uses: list[_Use]) -> str:
    taken = {u.name for u in uses}
    return _free(name, taken)


# --- the chain ---------------------------------------------------------------------------------------------------


def _public_names(flat: Flat, uses: list[_Use]) -> dict[str, str]:
    """Names of the values of the chain: inputs by their path, layer outputs as `layer/local`."""
    names = {n: n.removeprefix(INPUT) for n in flat.inputs}
    for use in uses:
        names |= {
            n: f"{use.name}/{local}"
            for n, local in zip(use.outputs, use.layer_class.outputs, strict=True)
            if n not in names
        }
    return names


def _cuts(
    layers: tuple[Layer, ...], inputs: tuple[str, ...], outputs: tuple[str, ...], values: dict[str, TensorSpec]
) -> tuple[Cut, ...]:
    """In front of each layer the values alive there; behind the last what the model returns."""
    alive = dict.fromkeys(outputs)
    backwards = [alive]
    for layer in reversed(layers):
        alive = {n: None for n in alive if n not in layer.outputs} | dict.fromkeys(layer.inputs)
        backwards.append(alive)
    order = {n: i for i, n in enumerate([*inputs, *(o for layer in layers for o in layer.outputs)])}
    chains = [tuple(sorted(names, key=order.__getitem__)) for names in reversed(backwards)]
    return tuple(Cut(_main(names, values, i == 0), names) for i, names in enumerate(chains))


def _main(names: tuple[str, ...], values: dict[str, TensorSpec], first: bool) -> str:
    """The largest activation, the latest of equals; before the first layer the largest input, the first of equals."""
    if first:
        return max(names, key=lambda n: values[n].bytes_at(_BATCH))

    def rank(name: str) -> tuple[bool, bool, int]:
        spec = values[name]
        return spec.requires_grad, spec.batch_dim is not None, spec.bytes_at(_BATCH)

    return max(reversed(names), key=rank)


def _token_dim(inputs: tuple[str, ...], values: dict[str, TensorSpec]) -> Extent | None:
    """Tokens a sample: the length of dim 1 of the first integer input if that has two dims."""
    first = next((values[n] for n in inputs if values[n].dtype.startswith(("int", "uint"))), None)
    if first is None or len(first.shape) != 2 or first.shape[1].is_batch:
        return None
    return first.shape[1]
