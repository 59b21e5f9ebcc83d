"""Sizes of traced tensors, and what is wrong with those that are no linear function of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.errors import TraceError
from autopar.graph import Extent, TensorSpec


class NotOneOperator(Exception):
    """The submodule at `path` can't be one operator."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class OperatorError(TraceError):
    """An operator of the module at `path` can't be in a plan."""

    def __init__(self, why: str, path: str) -> None:
        super().__init__(f"{path or 'the model'}: {why}")
        self.path = path


class NotLinearError(Exception):
    """A size is not a linear function of the batch: the batch can't be symbolic."""


class DependsOnDataError(Exception):
    """What is computed depends on values; `path` is the module, `line` the place in the model's code, if known."""

    def __init__(self, why: str, path: str = "", line: str = "") -> None:
        super().__init__(why)
        self.path, self.line = path, line


def extent(size: Any) -> Extent:
    """An int or symbolic size as a linear function of the batch, the only symbol there is."""
    if isinstance(size, int) and not isinstance(size, torch.SymInt):
        return Extent(0, size)
    expression = size.node.expr
    symbols = tuple(expression.free_symbols)
    if not symbols:
        return Extent(0, int(expression))
    if free_unbacked_symbols(size):
        raise DependsOnDataError(f"size {expression} depends on values")
    at = [expression.subs({symbols[0]: b}) for b in (2, 3, 7)]
    slope = at[1] - at[0]
    if len(symbols) > 1 or not all(v.is_integer for v in at) or at[2] - at[0] != 5 * slope:
        raise NotLinearError(f"size {expression} is not linear in the batch")
    return Extent(int(slope), int(at[0] - 2 * slope))


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype of a fake tensor."""
    return TensorSpec(tuple(extent(s) for s in tensor.shape), str(tensor.dtype).removeprefix("torch."))
