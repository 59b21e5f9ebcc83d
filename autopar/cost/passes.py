"""What a pass of an operator asks of a device, and the arguments of keys that say so. Torch-free.

Sizes are numbers, or columns of them, one entry a call (`autopar.cost.columns`): formulas are arithmetic on both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from autopar.graph import DTYPE_BYTES, Operand, OpKey


class Gemm(NamedTuple):
    """`batch` products (m, k) @ (k, n) in one kernel, and the bytes they move."""

    m: int
    n: int
    k: int
    batch: int
    bytes: float

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return 2.0 * self.batch * self.m * self.n * self.k


class Attention(NamedTuple):
    """One call of fused attention; `passes` is what it takes in forward calls' seconds, `flops` those of its products.

    Query heads share the key and value heads evenly.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    head_dim: int
    causal: bool
    passes: float
    flops: float


class Pass(NamedTuple):
    """Work of one direction: bytes moved, matrix products, kernels started, attention, and rows that are reduced;
    `host_bytes` between the device's memory and the host's, or in the host's."""

    bytes: float = 0.0
    gemms: tuple[Gemm, ...] = ()
    launches: int = 0
    attention: tuple[Attention, ...] = ()
    rows: int = 0
    host_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products."""
        return sum(g.flops for g in self.gemms) + sum(a.flops for a in self.attention)


class Work(NamedTuple):
    """Work of an op, forward and backward, the dtype its products are computed in, and its kind of reduction, if any.

    Kinds are `layer_norm` (all norms over the last dims) and `softmax`.
    """

    forward: Pass
    backward: Pass
    dtype: str
    kind: str = ""


NOTHING = Pass()

Formula: TypeAlias = Callable[[OpKey, list[Operand]], tuple[Pass, Pass]]
"""The forward and the backward pass of a key with these tensor arguments."""


def tensor_arguments(key: OpKey) -> list[Operand]:
    """The tensors among the arguments of `key`, in order, those inside lists included."""
    found = []
    for a in key.args:
        if type(a) is Operand:
            found.append(a)
        elif type(a) is tuple:
            found.extend(b for b in a if type(b) is Operand)
    found.extend(v for _, v in key.kwargs if type(v) is Operand)
    return found


def operand_bytes(operand: Operand) -> int:
    """Bytes of a tensor argument."""
    return prod(operand.shape) * DTYPE_BYTES[operand.dtype]


def argument(key: OpKey, position: int, name: str, default: object) -> object:
    """An argument by position or name."""
    if len(key.args) > position:
        return key.args[position]
    return dict(key.kwargs).get(name, default)


def largest(sizes: list[Any]) -> Any:
    """The largest of some sizes, at least one; of columns in each of their rows."""
    if any(isinstance(size, np.ndarray) for size in sizes):
        return reduce(np.maximum, sizes)
    return max(sizes)
