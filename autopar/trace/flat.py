"""The traced model before it is cut into layers: one list of operators, and markers where blocks were left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.graph import Argument, Op, Ref, Saved, TensorSpec

PARAM, BUFFER, INPUT = "param:", "buffer:", "input:"
"""Prefixes of the names of parameters, buffers and inputs; results of ops have none."""


@dataclass(frozen=True)
class BlockCall:
    """The place of block `path`, of kind `kind`.

    `inputs` are its tensor arguments. If `first`, its ops stand right before it and `results` are theirs; else its ops
    are those of the first of the kind and `results` are new values, in the same order.
    """

    path: str
    kind: int
    first: bool
    inputs: tuple[str, ...]
    results: tuple[str, ...]


Item: TypeAlias = Op | BlockCall


@dataclass(frozen=True)
class Flat:
    """Items in execution order over prefixed names; `params` and `buffers` by dotted name, `aliases` of tied ones.

    `values` has a spec for every name. `outputs` are the names the model returns; `loss` is the scalar to minimise;
    `updates` gives, by prefixed name, the value that forward leaves in each buffer it changes.
    """

    items: tuple[Item, ...]
    values: dict[str, TensorSpec] = field(hash=False)
    inputs: tuple[str, ...]
    params: dict[str, TensorSpec] = field(hash=False)
    buffers: dict[str, TensorSpec] = field(hash=False)
    aliases: dict[str, str] = field(hash=False)
    outputs: tuple[str, ...]
    loss: str | None
    updates: dict[str, str] = field(default_factory=dict, hash=False)
    assumptions: tuple[str, ...] = ()


def renamed_ends(flat: Flat, items: tuple[Item, ...], names: Mapping[str, str]) -> Flat:
    """`flat` with `items`, and with the names of outputs, loss and updates replaced as in `names`."""
    return replace(
        flat,
        items=items,
        outputs=tuple(names.get(o, o) for o in flat.outputs),
        loss=names.get(flat.loss, flat.loss) if flat.loss else None,
        updates={buffer: names.get(value, value) for buffer, value in flat.updates.items()},
    )


def in_module(op: Op, path: str) -> bool:
    """Whether `op` came from the module at `path` or one inside it."""
    return op.module == path or op.module.startswith(f"{path}.")


def body(items: tuple[Item, ...], call: BlockCall) -> list[Op]:
    """The ops of the block whose first call is `call`: the stretch of its module's ops right before it."""
    found: list[Op] = []
    for item in reversed(items[: items.index(call)]):
        if not isinstance(item, Op) or not in_module(item, call.path):
            break
        found.append(item)
    return found[::-1]


def map_refs(argument: Argument, change: Callable[[str], str]) -> Argument:
    """`argument` with the name in every Ref changed."""
    if isinstance(argument, Ref):
        return Ref(change(argument.name))
    if isinstance(argument, tuple):
        return tuple(map_refs(a, change) for a in argument)
    return argument


def rename(op: Op, names: Mapping[str, str]) -> Op:
    """`op` with names replaced everywhere; names that are not in `names` stay."""

    def new(name: str) -> str:
        return names.get(name, name)

    return replace(
        op,
        args=tuple(map_refs(a, new) for a in op.args),
        kwargs=tuple((k, map_refs(a, new)) for k, a in op.kwargs),
        results=_each(op.results, new),
        alias_of=tuple(None if a is None else new(a) for a in op.alias_of),
        saved=Saved(_each(op.saved.values, new), op.saved.extra),
    )


def rename_item(item: Item, names: Mapping[str, str]) -> Item:
    """`rename` for ops and block calls."""
    if isinstance(item, Op):
        return rename(item, names)
    return replace(
        item,
        inputs=_each(item.inputs, lambda n: names.get(n, n)),
        results=_each(item.results, lambda n: names.get(n, n)),
    )


def _each(names: Iterable[str], change: Callable[[str], str]) -> tuple[str, ...]:
    return tuple(change(n) for n in names)
