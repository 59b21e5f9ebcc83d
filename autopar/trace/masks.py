"""Attention masks that say no more than 'causal' or 'everything': recognised by computing them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autopar.graph import Op, Ref
from autopar.trace.flat import Flat, Item
from autopar.trace.run import run_op
from autopar.trace.saved import ATTENTION

MAX_ELEMENTS = 1 << 26
"""Largest mask that is computed; a larger one stays in the graph."""


def fold_masks(flat: Flat) -> Flat:
    """Replace attention masks that depend on no input, parameter or block and are exactly causal, or all true."""
    makers = {r: item for item in flat.items if isinstance(item, Op) for r in item.results}
    verdicts: dict[str, str] = {}
    items: list[Item] = []
    for item in flat.items:
        if isinstance(item, Op) and item.target == ATTENTION and (mask := _mask(item)):
            if mask not in verdicts:
                verdicts[mask] = _verdict(flat, mask, makers)
            if verdicts[mask]:
                item = _without_mask(item, causal=verdicts[mask] == "causal")
        items.append(item)
    return replace(flat, items=tuple(items))


def _mask(op: Op) -> str | None:
    given = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("attn_mask")
    return given.name if isinstance(given, Ref) else None


def _without_mask(op: Op, causal: bool) -> Op:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), op.args, strict=False))
    given |= {k: v for k, v in op.kwargs if k in ("dropout_p", "is_causal")}
    kwargs = tuple((k, v) for k, v in op.kwargs if k not in ("attn_mask", "dropout_p", "is_causal"))
    args = (*op.args[:3], None, given.get("dropout_p", 0.0), causal or given.get("is_causal", False))
    return replace(op, args=args, kwargs=kwargs)


def _verdict(flat: Flat, mask: str, makers: dict[str, Op]) -> str:
    """`causal`, `all` or '' (something else, or it depends on data)."""
    needed = _ancestors(mask, makers)
    if needed is None:
        return ""
    batch = next((b for b in (2, 1) if _largest(flat, needed, b) <= MAX_ELEMENTS), None)
    if batch is None:
        return ""
    env: dict[str, Tensor] = {}
    for item in flat.items:
        if isinstance(item, Op) and item.name in needed:
            env |= dict(zip(item.results, run_op(item, env, batch, "cpu"), strict=True))
    return _classify(env[mask])


def _ancestors(name: str, makers: dict[str, Op]) -> set[str] | None:
    """Names of the ops that compute `name`; None if it depends on an input, parameter, buffer or block."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        op = makers.get(waiting.pop())
        if op is None:
            return None
        if op.name not in found:
            found.add(op.name)
            waiting += op.operands
    return found


def _largest(flat: Flat, names: set[str], batch: int) -> int:
    sizes = [
        torch.Size(flat.values[r].shape_at(batch)).numel()
        for i in flat.items
        if isinstance(i, Op) and i.name in names
        for r in i.results
    ]
    return max(sizes)


def _classify(mask: Tensor) -> str:
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
