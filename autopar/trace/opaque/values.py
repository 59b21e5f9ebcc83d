"""Values that a submodule is tried with: parameters, of which large ones share theirs, and whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from autopar.trace.shadow import shadow

LARGE = 1 << 22
"""Elements of parameters from which on these share their values."""
BLOCK, SHIFT, PLACES = 1_000_003, 96, 64
"""Elements that are drawn, and then repeated; by how many the parts that parameters show lie apart (a multiple of 16
bytes, as kernels ask for), and how many places these begin at."""
Draw: TypeAlias = Callable[[list[int]], Tensor]
"""Whole numbers of a shape."""
DRAWS: tuple[Draw, ...] = (
    lambda shape: torch.randint(0, 2, shape),
    lambda shape: torch.randint(1, 3, shape),
    lambda shape: 2 - torch.arange(math.prod(shape)).reshape(shape).mul(2).floor_divide(max(1, math.prod(shape))),
    lambda shape: torch.ones(shape, dtype=torch.int64),
)
"""Whole numbers that are tried: some modules refuse 0 (lengths of sequences), or what isn't in falling order."""


def real(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the host with random parameters in a dtype; integers are 0."""
    stock = _Stock(dtype)

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return stock.drawn(tuple(tensor.shape))
        return torch.ones(tensor.shape, dtype=dtype)

    twin = shadow(module)
    twin._apply(drawn)
    return twin


class _Stock:
    """Random values for parameters: large ones of one shape, and what they hold along their first of three dims, show
    overlapping parts of the same values, so that a layer of experts takes the memory of one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._values: dict[tuple[int, ...], Tensor] = {}
        self._shown = 0

    def drawn(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor for reading only where it is large; the mean square of a row is 1."""
        scale = 1 / math.sqrt(max(1, shape[-1])) if shape else 1.0
        if math.prod(shape) <= LARGE:
            return torch.randn(shape, dtype=self.dtype) * scale
        alike = shape[0] if len(shape) > 2 else 1
        each = math.prod(shape) // alike
        if shape not in self._values:
            block = torch.randn(BLOCK, dtype=self.dtype) * scale
            count = each + SHIFT * (alike + PLACES)
            self._values[shape] = block.repeat(count // BLOCK + 1)
        self._shown += 1
        strides = torch.empty(shape, device="meta").stride()
        strides = (SHIFT, *strides[1:]) if alike > 1 else strides
        return self._values[shape].as_strided(shape, strides, SHIFT * (self._shown % PLACES))
