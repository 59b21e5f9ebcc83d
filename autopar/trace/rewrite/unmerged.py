"""Rows that a reshape merges with the batch behind another dim are taken apart again around what works row by row.

`nn.MultiheadAttention` multiplies its output as (sequence * batch, width). There the batch is no dim that could be
split; as (sequence, batch, width) it is, and the product is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.graph import Op, Ref, TensorSpec
from autopar.trace.flat import Flat, Item, rename

_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_ROW_BY_ROW = {"linear", "gelu", "relu", "silu", "tanh", "sigmoid", "neg", "to", "dropout", "contiguous", "clone"}
"""Ops that do the same to each row of their first operand, which alone may be merged."""


@dataclass(frozen=True)
class _Apart:
    """A merged value (rows, ...) as it is with its rows apart: the name, and the spec."""

    name: str
    spec: TensorSpec


def unmerged_rows(flat: Flat) -> Flat:
    """`flat` with ops on merged rows done before these are merged; sizes must be explicit."""
    values, apart, items = dict(flat.values), dict[str, _Apart](), list[Item]()
    for item in flat.items:
        if not isinstance(item, Op) or not item.operands:
            items.append(item)
        elif item.target in _VIEWS:
            items += _view(item, values, apart)
        elif item.operands[0] in apart and _is_row_by_row(item):
            items += _before_merging(item, values, apart)
        else:
            items.append(item)
    return replace(flat, items=tuple(items), values=values)


def _view(op: Op, values: dict[str, TensorSpec], apart: dict[str, _Apart]) -> list[Op]:
    """A view of what is merged is one of what is not; a view that merges is made in two steps."""
    if op.operands[0] in apart:
        op = rename(op, {op.operands[0]: apart[op.operands[0]].name})
    before, after = values[op.operands[0]], values[op.results[0]]
    lead = _merged_dims(before, after)
    if not lead:
        return [op]
    split = replace(after, shape=(*before.shape[:lead], *after.shape[1:]))
    name = f"{op.results[0]}@apart"
    values[name] = split
    apart[op.results[0]] = _Apart(name, split)
    return [_viewed(op, op.operands[0], name, split), _viewed(op, name, op.results[0], after)]


def _merged_dims(before: TensorSpec, after: TensorSpec) -> int:
    """How many leading dims, the batch among them but not first, the view makes its first dim; 0 if it doesn't."""
    at = before.batch_dim
    if not at or after.batch_dim != 0 or sum(e.is_batch for e in before.shape) > 1 or before.shape[at].fixed:
        return 0
    rows = 1
    for lead, size in enumerate(before.shape, start=1):
        rows *= size.per_sample or size.fixed
        if lead > at and rows == after.shape[0].per_sample and not after.shape[0].fixed:
            return lead
    return 0


def _is_row_by_row(op: Op) -> bool:
    name = op.target.split(".")[1]
    return name in _ROW_BY_ROW and op.operands.count(op.operands[0]) == 1 and op.args[0] == Ref(op.operands[0])


def _before_merging(op: Op, values: dict[str, TensorSpec], apart: dict[str, _Apart]) -> list[Op]:
    source, after = apart[op.operands[0]], values[op.results[0]]
    split = replace(
        after, shape=(*source.spec.shape[: len(source.spec.shape) - len(after.shape) + 1], *after.shape[1:])
    )
    name = f"{op.results[0]}@apart"
    values[name] = split
    apart[op.results[0]] = _Apart(name, split)
    early = replace(op, name=name, args=(Ref(source.name), *op.args[1:]), results=(name,))
    return [early, _viewed(op, name, op.results[0], after)]


def _viewed(op: Op, source: str, result: str, spec: TensorSpec) -> Op:
    sizes = tuple(e if e.is_batch else e.fixed for e in spec.shape)
    return Op(result, "aten.reshape.default", (Ref(source), sizes), (), (result,), (None,), module=op.module)
