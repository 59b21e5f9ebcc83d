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
from autopar.trace.run import run_op
from autopar.trace.saved import ATTENTION

MAX_ELEMENTS = 1 << 26
"""Largest tensor that is computed; a larger one stays as it is."""


def fold_masks(flat: Flat) -> Flat:
    """Replace attention masks that are causal or all true, and number no samples where they are all the same."""
    known = _Constants(flat)
    verdicts: dict[str, str] = {}
    items: list[Item] = []
    for item in flat.items:
        if isinstance(item, Op) and item.target == ATTENTION and (mask := _mask(item)):
            if mask not in verdicts:
                value = known.value(mask)
                verdicts[mask] = "" if value is None else _classify(value)
            if verdicts[mask]:
                item = _without_mask(item, causal=verdicts[mask] == "causal")
        items.append(item)
    return _same_for_all(replace(flat, items=tuple(items)), known)


class _Constants:
    """The values of `flat` that depend on no input, parameter or block, computed when asked for."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.makers: dict[str, Op] = {}
        for item in flat.items:
            if isinstance(item, Op) and all(n in self.makers for n in item.operands):
                self.makers |= dict.fromkeys(item.results, item)
        self._values: dict[int, dict[str, Tensor]] = {1: {}, 2: {}}

    def value(self, name: str, batch: int | None = None) -> Tensor | None:
        """The tensor at `batch` (2, or 1 if that is too large); None if it depends on data or is too large."""
        if name not in self.makers:
            return None
        needed = self.ancestors(name)
        batch = batch or (2 if self._largest(needed, 2) <= MAX_ELEMENTS else 1)
        if self._largest(needed, batch) > MAX_ELEMENTS:
            return None
        env = self._values[batch]
        for op in needed:
            if op.results[0] not in env:
                env |= dict(zip(op.results, run_op(op, env, batch, "cpu"), strict=True))
        return env[name]

    def ancestors(self, name: str) -> list[Op]:
        """The ops that compute `name`, in execution order."""
        found: dict[str, Op] = {}
        waiting = [name]
        while waiting:
            op = self.makers[waiting.pop()]
            if op.name not in found:
                found[op.name] = op
                waiting += op.operands
        return [i for i in self._flat.items if isinstance(i, Op) and i.name in found]

    def _largest(self, ops: list[Op], batch: int) -> int:
        return max(torch.Size(self._flat.values[r].shape_at(batch)).numel() for op in ops for r in op.results)


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


def _classify(mask: Tensor) -> str:
    """`causal`, `all` or '' (something else)."""
    queries, keys = mask.shape[-2:]
    if mask.dtype != torch.bool:
        blocked = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((blocked | (mask == 0)).all()):
            return ""
        mask = ~blocked
    if bool(mask.all()):
        return "all"
    lower = torch.ones(queries, keys, dtype=torch.bool).tril()
    return "causal" if queries == keys and bool((mask == lower).all()) else ""


# --- the same for every sample -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Single:
    """Ops that make a constant for one sample and broadcast it, the specs of what they make, and its new name."""

    ops: tuple[Op, ...]
    values: dict[str, TensorSpec]
    name: str


def _same_for_all(flat: Flat, known: _Constants) -> Flat:
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


def _single(name: str, known: _Constants, values: Mapping[str, TensorSpec]) -> _Single | None:
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
