"""What autograd does at each operator: which results carry gradients, share storage, and what is kept for backward.

Found by running the operators on meta tensors at two batch sizes with autograd's own hooks; sizes follow from the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.graph import Extent, Op, Ref, Saved, TensorSpec
from autopar.trace.flat import BlockCall, Flat, Item
from autopar.trace.opaque.operator import OPAQUE, form_of
from autopar.trace.run import run_op
from autopar.trace.sizes import OperatorError
from autopar.trace.torch_private import storage_id

BATCHES = (2, 4)
ATTENTION = "aten.scaled_dot_product_attention.default"
DROPOUT = "aten.dropout.default"

Extra: TypeAlias = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor that is kept."""


@dataclass(frozen=True)
class _Seen:
    """One op at one batch size: what it saved, the aliases of its results, and whether they carry gradients."""

    values: tuple[str, ...]
    extra: tuple[Extra, ...]
    alias_of: tuple[str | None, ...]
    requires_grad: tuple[bool, ...]


def annotate(flat: Flat) -> Flat:
    """`flat` with `saved`, `alias_of` and `requires_grad` filled in for every op and value."""
    small, large = (_observe(flat, batch) for batch in BATCHES)
    items: list[Item] = []
    values = dict(flat.values)
    for item in flat.items:
        if isinstance(item, Op):
            seen = small.ops[item.name]
            for result, grad in zip(item.results, seen.requires_grad, strict=True):
                values[result] = replace(values[result], requires_grad=grad)
            item = replace(item, alias_of=seen.alias_of, saved=_saved(item, seen, large.ops[item.name], values))
        items.append(item)
    for name, grad in small.requires_grad.items():
        values[name] = replace(values[name], requires_grad=grad)
    return replace(flat, items=tuple(items), values=values)


def _saved(op: Op, small: _Seen, large: _Seen, values: Mapping[str, TensorSpec]) -> Saved:
    if not any(small.requires_grad):
        return Saved()
    if op.target == ATTENTION:
        return _flash_attention(op, values)
    if op.target == OPAQUE:  # of one sample; where the batch is not known, of all
        batched = any(values[name].batch_dim is not None for name in op.operands)
        kept = form_of(str(op.args[1])).saved_bytes
        inputs = tuple(n for n in op.operands if ":" not in n and values[n].requires_grad)
        return Saved(inputs, (TensorSpec((Extent(kept) if batched else Extent(0, kept),), "uint8"),))
    if op.target == DROPOUT and op.args[2] is True:  # kept as a mask of one byte an element
        return Saved((), (TensorSpec(values[op.results[0]].shape, "bool"),))
    one, other = small.extra, large.extra
    if len(one) != len(other):  # so many for each sample: steps of a recurrent layer along the first dim
        one, other = _by_dtype(one), _by_dtype(other)
    extra = tuple(TensorSpec(_extents(a, b), dtype) for (a, dtype), (b, _) in zip(one, other, strict=True))
    return Saved(small.values, extra)


def _by_dtype(extra: Sequence[Extra]) -> tuple[Extra, ...]:
    """All elements of each dtype in one row."""
    dtypes = sorted({dtype for _, dtype in extra})
    return tuple(((sum(prod(shape) for shape, own in extra if own == dtype),), dtype) for dtype in dtypes)


def _flash_attention(op: Op, values: Mapping[str, TensorSpec]) -> Saved:
    """Query, key, value, mask, output and one float32 log-sum-exp a query: what fused kernels keep."""
    kept = tuple(dict.fromkeys(a.name for a in op.args[:4] if isinstance(a, Ref)))
    out = values[op.results[0]]
    return Saved((*kept, op.results[0]), (TensorSpec(out.shape[:-1], "float32"),))


def _laid_out_as(query: Tensor, result: Tensor) -> Tensor:
    """Attention's result in the memory order of its query, as flash kernels write it on cuda and cpu alike.

    With the query's heads of a place side by side, as a split projection leaves them, joining them again is a view.
    """
    order = sorted(range(query.ndim), key=lambda d: query.stride(d), reverse=True)
    made = torch.empty_permuted(result.shape, order, dtype=result.dtype, device="meta")
    return made.requires_grad_(result.requires_grad)


def _extents(small: tuple[int, ...], large: tuple[int, ...]) -> tuple[Extent, ...]:
    step = BATCHES[1] - BATCHES[0]
    slopes = [(b - a) // step for a, b in zip(small, large, strict=True)]
    return tuple(Extent(s, a - s * BATCHES[0]) for s, a in zip(slopes, small, strict=True))


class _Observation:
    def __init__(self) -> None:
        self.ops: dict[str, _Seen] = {}
        self.requires_grad: dict[str, bool] = {}


def _observe(flat: Flat, batch: int) -> _Observation:
    """Run the whole list once on meta tensors at `batch`."""
    found = _Observation()
    env = {name: _empty(spec, batch) for name, spec in flat.values.items() if ":" in name}
    results_of_kind: dict[int, tuple[Tensor, ...]] = {}
    for item in flat.items:
        if isinstance(item, BlockCall):
            if item.first:
                results_of_kind[item.kind] = tuple(env[r] for r in item.results)
            for name, like in zip(item.results, results_of_kind[item.kind], strict=True):
                if not item.first:
                    env[name] = torch.empty_like(like).requires_grad_(like.requires_grad)
                    found.requires_grad[name] = like.requires_grad
        else:
            found.ops[item.name] = _observe_op(item, env, batch, flat.values)
    return found


def _empty(spec: TensorSpec, batch: int) -> Tensor:
    tensor = torch.empty(spec.shape_at(batch), dtype=getattr(torch, spec.dtype), device="meta")
    return tensor.requires_grad_(spec.requires_grad)


def _opaque_results(
    op: Op, env: Mapping[str, Tensor], values: Mapping[str, TensorSpec], batch: int
) -> tuple[Tensor, ...]:
    """What a submodule returns: gradients flow to all floating results if to any of its tensors."""
    flows = any(env[name].requires_grad for name in op.operands)
    results = (_empty(replace(values[name], requires_grad=False), batch) for name in op.results)
    return tuple(r.requires_grad_(flows and r.is_floating_point()) for r in results)


def _observe_op(op: Op, env: dict[str, Tensor], batch: int, values: Mapping[str, TensorSpec]) -> _Seen:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = _opaque_results(op, env, values, batch) if op.target == OPAQUE else run_op(op, env, batch, "meta")
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError) as error:
        raise OperatorError(f"{op.target} can't be run by itself ({error})", op.module) from error
    if op.target == ATTENTION:
        results = tuple(_laid_out_as(env[op.operands[0]], result) for result in results)
    owners = {storage_id(env[name]): name for name in reversed(op.operands)}
    alias_of = tuple(owners.get(storage_id(r)) for r in results)
    env |= dict(zip(op.results, results, strict=True))
    owners = {storage_id(r): name for name, r in zip(op.results, results, strict=True)} | owners
    names = tuple(dict.fromkeys(owners[storage_id(t)] for t in packed if storage_id(t) in owners))
    extra = {
        storage_id(t): (tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for t in packed
        if storage_id(t) not in owners
    }
    return _Seen(names, tuple(extra.values()), alias_of, tuple(r.requires_grad for r in results))
