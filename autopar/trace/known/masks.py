"""Tensors that depend on no data (attention masks, positions) are computed to learn what they are.

A mask that is exactly causal becomes a flag of the attention operator and one that is all true is dropped. What is
equal for every sample but was made by numbering the samples is made for one sample and broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.graph import Argument, Extent, Op, Ref, TensorSpec
from autopar.trace.flat import BlockCall, Flat, Item, rename, rename_item
from autopar.trace.known.constants import Constants
from autopar.trace.known.rows import sampled_rows
from autopar.trace.rewrite.indexing import without_identity_indexing
from autopar.trace.saved import ATTENTION


def fold_masks(flat: Flat) -> Flat:
    """Replace attention masks that are causal or all true, and number no samples where they are all the same."""
    flat = without_identity_indexing(flat, Constants(flat))
    known = Constants(flat)
    verdicts: dict[str, str] = {}
    items: list[Item] = []
    for item in flat.items:
        if isinstance(item, Op) and item.target == ATTENTION and (mask := _mask(item)):
            if mask not in verdicts:
                verdicts[mask] = _verdict(mask, known)
            if verdicts[mask]:
                item = _without_mask(item, causal=verdicts[mask] == "causal")
        items.append(item)
    return _same_for_all(replace(flat, items=tuple(items)), known)


# --- masks of attention --------------------------------------------------------------------------------------------


def _mask(op: Op) -> str | None:
    given = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("attn_mask")
    return given.name if isinstance(given, Ref) else None


def _without_mask(op: Op, causal: bool) -> Op:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), op.args, strict=False))
    given |= {k: v for k, v in op.kwargs if k in ("dropout_p", "is_causal")}
    kwargs = tuple((k, v) for k, v in op.kwargs if k not in ("attn_mask", "dropout_p", "is_causal"))
    args = (*op.args[:3], None, given.get("dropout_p", 0.0), causal or given.get("is_causal", False))
    return replace(op, args=args, kwargs=kwargs)


def _verdict(mask: str, known: Constants) -> str:
    """`causal`, `all` or '' (something else); of a mask too large to compute, by the rows of a sample."""
    value = known.value(mask)
    if value is not None:
        return _classify(value, torch.arange(value.shape[-2]), value.shape[-2])
    rows = sampled_rows(mask, known)
    return "" if rows is None else _classify(*rows)


def _classify(mask: Tensor, rows: Tensor, queries: int) -> str:
    """What a mask of `queries` rows is, of which `mask` (..., rows, keys) has those numbered `rows`."""
    if mask.dtype != torch.bool:
        blocked = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((blocked | (mask == 0)).all()):
            return ""
        mask = ~blocked
    if bool(mask.all()):
        return "all"
    lower = torch.arange(mask.shape[-1]) <= rows.unsqueeze(1)
    return "causal" if queries == mask.shape[-1] and bool((mask == lower).all()) else ""


# --- the same for every sample -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Single:
    """Ops that make a constant for one sample and broadcast it, the specs of what they make, and its new name."""

    ops: tuple[Op, ...]
    values: dict[str, TensorSpec]
    name: str


def _same_for_all(flat: Flat, known: Constants) -> Flat:
    """Constants that number the samples but are equal for all of them are made for one sample and broadcast."""
    readers = [i for i in flat.items if isinstance(i, BlockCall) or i.results[0] not in known.makers]
    read = {n for i in readers for n in (i.operands if isinstance(i, Op) else i.inputs)}
    singles = {n: single for n in read & set(known.makers) if (single := _single(n, known, flat.values))}
    names = {n: single.name for n, single in singles.items()}
    values = dict(flat.values)
    items: list[Item] = []
    for item in flat.items:
        if isinstance(item, BlockCall) or item.results[0] not in known.makers:
            items.append(rename_item(item, names))
            continue
        items.append(item)
        for single in (singles[r] for r in item.results if r in singles):
            items += single.ops
            values |= single.values
    return replace(flat, items=tuple(items), values=values)


def _single(name: str, known: Constants, values: Mapping[str, TensorSpec]) -> _Single | None:
    batch_dim = values[name].batch_dim
    if batch_dim is None or name not in known.makers or values[name].shape[batch_dim] != Extent(1):
        return None
    ops = known.ancestors(name)
    if not any(op.target.startswith("aten.arange") and values[op.results[0]].batch_dim is not None for op in ops):
        return None
    two, one = known.value(name, 2), known.value(name, 1)
    if two is None or one is None or not torch.equal(two, one.expand(two.shape)):
        return None
    renamed = {r: f"{r}@{name}" for op in ops for r in op.results}
    made = {renamed[r]: _at_one(values[r]) for op in ops for r in op.results}
    place = known.makers[name].module  # the clones stand right behind the original
    first = [_one_sample(replace(rename(op, renamed), name=renamed[op.results[0]], module=place)) for op in ops]
    result = f"{name}@all"
    shape = tuple(e if e.is_batch else e.fixed for e in values[name].shape)
    expand = Op(result, "aten.expand.default", (Ref(renamed[name]), shape), (), (result,), (None,), module=place)
    return _Single((*first, expand), made | {result: values[name]}, result)


def _at_one(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=tuple(Extent(0, e.at(1)) for e in spec.shape))


def _one_sample(op: Op) -> Op:
    """`op` with every size that grows with the batch at one sample."""
    return replace(op, args=tuple(map(_size_at_one, op.args)), kwargs=tuple((k, _size_at_one(a)) for k, a in op.kwargs))


def _size_at_one(argument: Argument) -> Argument:
    if isinstance(argument, Extent):
        return argument.at(1)
    return tuple(map(_size_at_one, argument)) if isinstance(argument, tuple) else argument
