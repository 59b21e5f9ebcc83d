"""Operators told where to write (`out=`), and writes into complex tensors, in forms that have a derivative."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autopar.graph import Extent, Op, Ref, TensorSpec
from autopar.trace.flat import Flat, Item

_SCATTERS = {"aten.slice_scatter.default", "aten.select_scatter.default"}
_PARTS = {"complex64": "float32", "complex128": "float64"}


def without_out(flat: Flat) -> Flat:
    """`f(x, out=y)` as `y.copy_(f(x))`."""
    values = dict(flat.values)
    items = tuple(new for item in flat.items for new in _copied(item, values))
    return replace(flat, items=items, values=values)


def _copied(item: Item, values: dict[str, TensorSpec]) -> Iterator[Item]:
    target = dict(item.kwargs).get("out") if isinstance(item, Op) else None
    overload = _without_out(item.target) if isinstance(item, Op) and isinstance(target, Ref) else ""
    if not isinstance(item, Op) or not overload:
        yield item
        return
    made = f"{item.results[0]}@made"
    values[made] = values[item.results[0]]
    kwargs = tuple((k, v) for k, v in item.kwargs if k != "out")
    yield replace(item, name=made, target=overload, kwargs=kwargs, results=(made,), alias_of=(None,))
    yield replace(item, target="aten.copy_.default", args=(target, Ref(made)), kwargs=())


def _without_out(target: str) -> str:
    """The overload that takes the same arguments but for `out`; '' where there is none."""
    namespace, name, variant = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    own = [(a.name, str(a.type)) for a in getattr(packet, variant)._schema.arguments if not a.is_out]
    for other in packet.overloads():
        found = [(a.name, str(a.type)) for a in getattr(packet, other)._schema.arguments]
        if found == own:
            return f"{namespace}.{name}.{other}"
    return ""


def written_as_reals(flat: Flat) -> Flat:
    """Writes into parts of complex tensors as writes into pairs of real ones, which have a derivative."""
    values = dict(flat.values)
    items = tuple(new for item in flat.items for new in _as_reals(item, values))
    return replace(flat, items=items, values=values)


def _as_reals(item: Item, values: dict[str, TensorSpec]) -> Iterator[Item]:
    if not isinstance(item, Op) or item.target not in _SCATTERS or values[item.results[0]].dtype not in _PARTS:
        yield item
        return
    rank = len(values[item.results[0]].shape)
    dim = item.args[2] if len(item.args) > 2 else 0
    pairs: list[str] = []
    for name in item.operands[:2]:
        pairs.append(f"{item.results[0]}@{len(pairs)}")
        values[pairs[-1]] = _pairs(values[name])
        yield replace(
            item, name=pairs[-1], target="aten.view_as_real.default", args=(Ref(name),), kwargs=(), results=(pairs[-1],)
        )
    made = f"{item.results[0]}@pairs"
    values[made] = _pairs(values[item.results[0]])
    at = int(dim) % rank  # type: ignore[arg-type]
    yield replace(item, name=made, args=(*map(Ref, pairs), at, *item.args[3:]), results=(made,))
    yield replace(item, target="aten.view_as_complex.default", args=(Ref(made),), kwargs=())


def _pairs(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(*spec.shape, Extent(0, 2)), dtype=_PARTS[spec.dtype])
