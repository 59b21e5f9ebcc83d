"""Values that depend on no data: computed when somebody asks what they are."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.graph import Op
from autopar.trace.flat import Flat
from autopar.trace.randomness import draws
from autopar.trace.run import run_op

MAX_ELEMENTS = 1 << 26
"""Largest tensor that is computed; a larger one is not known."""


class Constants:
    """The values of `flat` that depend on no input, parameter or block, computed when asked for."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.makers: dict[str, Op] = {}
        for item in flat.items:
            if isinstance(item, Op) and all(n in self.makers for n in item.operands) and not draws(item):
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
        return [i for i in self.flat.items if isinstance(i, Op) and i.name in found]

    def _largest(self, ops: list[Op], batch: int) -> int:
        return max(torch.Size(self.flat.values[r].shape_at(batch)).numel() for op in ops for r in op.results)
