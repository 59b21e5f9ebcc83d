"""Bottleneck assignment: the perfect matching whose dearest pair is cheapest.

Thresholds are bisected; below a threshold augmenting paths look for a perfect matching (Kuhn, 1955; Gross, 1959).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bottleneck(costs: NDArray[np.float64]) -> tuple[float, tuple[int, ...]]:
    """The least cost under which rows (n) and columns (n) can all be paired, and the column of each row."""
    levels = np.unique(costs)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _matching(costs <= levels[middle]) is None:
            low = middle + 1
        else:
            high = middle
    found = _matching(costs <= levels[low])
    if found is None:
        raise ValueError("the largest cost admits every pair")  # of finite numbers
    return float(levels[low]), found


def _matching(allowed: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """The column of each row in a perfect matching of allowed pairs, None where there is none."""
    row_of: dict[int, int] = {}
    columns = [np.flatnonzero(row).tolist() for row in allowed]
    for row in range(len(columns)):
        if not _augment(row, columns, row_of, set()):
            return None
    column_of = {row: column for column, row in row_of.items()}
    return tuple(column_of[row] for row in range(len(columns)))


def _augment(row: int, columns: list[list[int]], row_of: dict[int, int], seen: set[int]) -> bool:
    for column in columns[row]:
        if column not in seen:
            seen.add(column)
            if column not in row_of or _augment(row_of[column], columns, row_of, seen):
                row_of[column] = row
                return True
    return False
