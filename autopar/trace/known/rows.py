"""Some rows of a constant that is too large to compute: each is exact, at the size it has.

Rows are those of the last dim but one. A row is asked of the ops that make the constant, from the last back to tensors
that are small enough to compute whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autopar.graph import Argument, Extent, Op, Ref, TensorSpec
from autopar.trace.known.constants import MAX_ELEMENTS, Constants
from autopar.trace.run import overload, run_op

COUNT = 256
"""How many rows are computed, the first and last few among them."""

_SIZED = {
    "expand": 1, "broadcast_to": 1, "full": 0, "ones": 0, "zeros": 0, "new_ones": 1, "new_zeros": 1, "new_full": 1,
}  # fmt: skip
"""Ops one of whose arguments is the shape of the result, and which."""

_SAME = {
    "to", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "_to_copy", "where", "masked_fill", "__and__",
    "__or__", "__xor__",
}  # fmt: skip
"""Elementwise ops that torch does not tag as such."""


class _Unknown(Exception):
    """An op that is not known to make rows from rows."""


def sampled_rows(name: str, known: Constants) -> tuple[Tensor, Tensor, int] | None:
    """Rows (..., rows, columns) of constant `name` at two samples, their numbers, and how many there are in all.

    None if the value depends on data or is made in ways that are not followed row by row.
    """
    shape = known.flat.values[name].shape_at(_BATCH)
    if name not in known.makers or len(shape) < 2:
        return None
    count = shape[-2]
    rows = torch.arange(count)
    if count > COUNT:
        ends = torch.arange(8)
        rows = torch.cat((ends, torch.linspace(8, count - 9, COUNT - 16).long(), count - 1 - ends)).unique()
    try:
        return _Rows(known, rows, count).of(name, 2), rows, count
    except _Unknown:
        return None


_BATCH = 2


class _Rows:
    """Evaluates values cut down to `rows` of the `count` along one dim, which is counted from the end."""

    def __init__(self, known: Constants, rows: Tensor, count: int) -> None:
        self.known, self.rows, self.count = known, rows, count
        self.found: dict[tuple[str, int], Tensor] = {}

    def of(self, name: str, dim: int) -> Tensor:
        """Value `name` cut along its `dim`-th dim from the end; whole if it does not reach over all rows there."""
        if (name, dim) not in self.found:
            whole = self.known.value(name, _BATCH) if self._elements(name) <= MAX_ELEMENTS // COUNT else None
            self.found[name, dim] = self._made(name, dim) if whole is None else self._cut(whole, dim)
        return self.found[name, dim]

    def _cut(self, whole: Tensor, dim: int) -> Tensor:
        spread = whole.dim() >= dim and whole.shape[-dim] == self.count
        return whole.index_select(-dim, self.rows) if spread else whole

    def _elements(self, name: str) -> int:
        return torch.Size(self._spec(name).shape_at(_BATCH)).numel()

    def _spec(self, name: str) -> TensorSpec:
        return self.known.flat.values[name]

    def _made(self, name: str, dim: int) -> Tensor:
        op = self.known.makers[name]
        what = op.target.split(".")[1]
        shape = self._spec(name).shape_at(_BATCH)
        if what in ("tril", "triu"):
            return self._triangle(op, what, dim)
        if what == "unsqueeze":
            new = len(shape) - int(op.args[1]) % len(shape)  # type: ignore[arg-type]
            if new == dim:
                raise _Unknown
            return self._run(op, dim if new > dim else dim - 1)
        if what in _SIZED:
            return self._run(self._resized(op, _SIZED[what], dim, len(shape)), dim)
        if what in _SAME or torch.Tag.pointwise in overload(op.target).tags:
            return self._run(op, dim)
        raise _Unknown

    def _run(self, op: Op, dim: int) -> Tensor:
        env = {operand: self.of(operand, dim) for operand in op.operands}
        return run_op(op, env, _BATCH, "cpu")[0]

    def _resized(self, op: Op, position: int, dim: int, rank: int) -> Op:
        sizes = op.args[position]
        if not isinstance(sizes, tuple) or len(sizes) != rank or not self._is_count(sizes[-dim]):
            raise _Unknown
        cut = tuple(len(self.rows) if i == rank - dim else size for i, size in enumerate(sizes))
        return replace(op, args=(*op.args[:position], cut, *op.args[position + 1 :]))

    def _is_count(self, size: Argument) -> bool:
        return size == self.count and not isinstance(size, Extent)

    def _triangle(self, op: Op, what: str, dim: int) -> Tensor:
        source = op.args[0]
        if dim != 2 or not isinstance(source, Ref):
            raise _Unknown
        diagonal = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("diagonal", 0)
        whole = self.of(source.name, dim)
        distance = torch.arange(whole.shape[-1]) - self.rows.unsqueeze(1)
        kept = distance <= diagonal if what == "tril" else distance >= diagonal  # type: ignore[operator]
        return torch.where(kept, whole, torch.zeros((), dtype=whole.dtype))
