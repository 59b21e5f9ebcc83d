"""What a factor rule says of one op: which dims belong together, and what a split of each factor needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import TypeAlias

from autopar.graph import Extent, hashed_once

LINEAR = "+"
"""Pseudo factor of ops that are linear in all their operands: on its axis operands and results are partial sums."""


Grains: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """Something a mesh axis may split. `extent` counts what can be dealt out (a merged dim h*d split by h counts h)."""

    name: str
    extent: Extent


@hashed_once
@dataclass(frozen=True)
class OpRule:
    """Factors of one op and where they stand.

    `operands[i][d]` is the factor that splits dim `d` of operand `i` ('' = the dim can't be split); `results` likewise.
    A factor that a result lacks is summed over (the result becomes partial), unless it is in `whole`: then its kernel
    itself returns the whole result. `kernels[f]` names the function of `kernels.py` that runs the op when `f` is split;
    `kernels[""]` runs it always. Operands in `added` (indices) are terms of a sum: where the result is partial for want
    of their factor, so are they. Factors of one op are split independently on each mesh axis. A split of a factor in
    `solid` must leave no rank without a part. `grains[t][d]` is how many elements of dim `d` of tensor `t` (operands,
    then results) belong to one of what is dealt out; () where all are 1.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    kernels: dict[str, str] = field(default_factory=dict, hash=False)
    whole: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    solid: frozenset[str] = frozenset()
    grains: Grains = ()

    def kernel(self, factors: tuple[str, ...]) -> str:
        """Name of the kernel that runs the op when the mesh axes split `factors`, '' where the op itself is right."""
        return next((self.kernels[f] for f in (*factors, "") if f in self.kernels), "")


def common_extent(first: Extent, second: Extent) -> Extent | None:
    """Largest extent that divides both evenly at every batch (gcd of multiples of one linear form), or None."""
    mine, other = gcd(first.per_sample, first.fixed), gcd(second.per_sample, second.fixed)
    if not mine or not other:
        return None
    unit = (first.per_sample // mine, first.fixed // mine)
    if unit != (second.per_sample // other, second.fixed // other):
        return None
    shared = gcd(mine, other)
    return Extent(unit[0] * shared, unit[1] * shared)


def grain_of(extent: Extent, piece: Extent) -> int:
    """How many times `piece`, which divides it at every batch, an extent is."""
    return extent.per_sample // piece.per_sample if piece.per_sample else extent.fixed // piece.fixed
