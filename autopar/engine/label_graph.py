"""The labelling problem: give every variable one label so that the sum of unary and pair costs is least."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.engine.errors import ProblemError

Costs: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class LabelGraph:
    """Variables with finite labels, and K cost scenarios that are solved together.

    `sizes[v]` is the number of labels of variable v. `unary[v]` is (K or 1, L_v), 0 where absent; `pair[i, j]` is
    (K or 1, L_i, L_j), and (i, j) and (j, i) may both be given: they add up. Any cost may be inf (illegal), none NaN or
    -inf. `keep` are the variables over which the answer stays open. Raises ProblemError on shapes that don't fit.
    """

    sizes: tuple[int, ...]
    unary: dict[int, Costs] = field(default_factory=dict)
    pair: dict[tuple[int, int], Costs] = field(default_factory=dict)
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(not 0 <= v < len(self.sizes) for v in self.keep) or len(set(self.keep)) < len(self.keep):
            raise ProblemError(f"keep is {self.keep}; give distinct variables from 0 to {len(self.sizes) - 1}.")
        for scope, table in self.tables():
            self._check(scope, table)

    def tables(self) -> Iterable[tuple[tuple[int, ...], Costs]]:
        """Every cost table with the variables it is over, unary ones first."""
        yield from (((v,), table) for v, table in self.unary.items())
        yield from self.pair.items()

    @property
    def scenarios(self) -> int:
        """K, the number of cost scenarios."""
        return max((table.shape[0] for _, table in self.tables()), default=1)

    def _check(self, scope: tuple[int, ...], table: Costs) -> None:
        if any(not 0 <= v < len(self.sizes) for v in scope):
            raise ProblemError(f"costs are given for {scope}, but variables run from 0 to {len(self.sizes) - 1}.")
        wanted = tuple(self.sizes[v] for v in scope)
        if table.shape[1:] != wanted or table.shape[0] not in (1, self.scenarios):
            raise ProblemError(
                f"costs of {scope} have shape {table.shape}; (1 or {self.scenarios}, {str(wanted)[1:]} is allowed."
            )
        if np.isnan(table).any() or np.isneginf(table).any():
            raise ProblemError(f"costs of {scope} hold NaN or -inf; give finite numbers, or inf for illegal.")


def equal_slices(table: Costs, axis: int) -> tuple[Labels, Labels]:
    """Classes of equal slices along `axis`: the class of each index, and one index of each class."""
    rows = np.ascontiguousarray(np.moveaxis(table, axis, 0))
    return classes_of(row.tobytes() for row in rows)


def classes_of(keys: Iterable[Hashable]) -> tuple[Labels, Labels]:
    """Number equal keys alike, in order of first appearance: the class of each key, and where each class began."""
    seen: dict[Hashable, int] = {}
    first: list[int] = []
    classes: list[int] = []
    for position, key in enumerate(keys):
        if key not in seen:
            seen[key] = len(first)
            first.append(position)
        classes.append(seen[key])
    return np.array(classes, dtype=np.intp), np.array(first, dtype=np.intp)
