"""Factor rules: how the dims of an op's operands and results belong together, and what a split of each factor means."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.graph import Extent


@dataclass(frozen=True, slots=True)
class Factor:
    """Something a mesh axis may split. `extent` counts what can be dealt out (a merged dim h*d split by h counts h)."""

    name: str
    extent: Extent


@dataclass(frozen=True)
class OpRule:
    """Factors of one op and where they stand.

    `operands[i][d]` is the factor that splits dim `d` of operand `i` ('' = the dim can't be split); `results` likewise.
    A factor that a result lacks is summed over (the result becomes partial), unless it is in `whole`: then its kernel
    itself returns the whole result. `kernels[f]` names the function of `kernels.py` that runs the op when `f` is split.
    Factors of one op are split independently on each mesh axis.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    kernels: dict[str, str] = field(default_factory=dict, hash=False)
    whole: frozenset[str] = frozenset()
