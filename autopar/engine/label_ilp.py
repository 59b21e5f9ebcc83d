"""A label graph as an integer program: the cross-check of elimination, and the way where a graph is too wide for it.

The local marginal polytope (Wainwright, Jordan: Graphical Models, 2008): a binary for each label, and for each pair
table a share for each pair of label classes that the table tells apart, summing to the labels on either side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.engine.label_graph import Costs, LabelGraph, equal_slices
from autopar.engine.mip import Columns, Mip


@dataclass(frozen=True)
class Labelling:
    """`labels` of all variables and their `cost`, not below `bound`; None and inf when there is no legal labelling.

    `complete` says whether the search ended before the time limit.
    """

    labels: tuple[int, ...] | None
    cost: float
    bound: float
    complete: bool


def best_labelling(
    graph: LabelGraph,
    scenario: int = 0,
    kept_labels: tuple[int, ...] | None = None,
    relative_gap: float = 1e-6,
    time_limit_s: float | None = None,
) -> Labelling:
    """The least cost of one scenario, with the kept variables at `kept_labels` (None: they are free, too)."""
    mip = Mip()
    columns = [_label_columns(mip, graph, v, scenario) for v in range(len(graph.sizes))]
    for variable, label in zip(graph.keep, kept_labels or (), strict=bool(kept_labels)):
        mip.entries(mip.rows(1, 1.0, 1.0), columns[variable][label], 1.0)
    for (i, j), table in graph.pair.items():
        costs = table[min(scenario, len(table) - 1)]
        if i == j:
            continue  # among the costs of the labels
        _pair_columns(mip, columns[i], columns[j], costs)
    result = mip.solve(relative_gap, time_limit_s)
    if result.values is None:
        return Labelling(None, np.inf, result.bound, result.complete)
    labels = tuple(int(np.argmax(result.values[c])) for c in columns)
    return Labelling(labels, result.objective, result.bound, result.complete)


def _label_columns(mip: Mip, graph: LabelGraph, variable: int, scenario: int) -> Columns:
    """One binary for each label; exactly one is 1."""
    costs = np.zeros(graph.sizes[variable])
    if variable in graph.unary:
        table = graph.unary[variable]
        costs = costs + table[min(scenario, len(table) - 1)]
    if (variable, variable) in graph.pair:
        table = graph.pair[variable, variable]
        costs = costs + np.diagonal(table[min(scenario, len(table) - 1)])
    legal = np.isfinite(costs)
    columns = mip.columns(len(costs), legal, np.where(legal, costs, 0.0), integer=True)
    mip.entries(mip.rows(1, 1.0, 1.0), columns, 1.0)
    return columns


def _pair_columns(mip: Mip, left: Columns, right: Columns, costs: Costs) -> None:
    """One share for each legal pair of classes; the shares of a class sum to its labels."""
    (left_class, left_first), (right_class, right_first) = equal_slices(costs, 0), equal_slices(costs, 1)
    small = costs[np.ix_(left_first, right_first)]
    legal = np.argwhere(np.isfinite(small))
    shares = mip.columns(len(legal), 1.0, small[legal[:, 0], legal[:, 1]])
    for side, (labels, classes) in enumerate(((left, left_class), (right, right_class))):
        rows = mip.rows(small.shape[side], 0.0, 0.0)
        mip.entries(rows[legal[:, side]], shares, 1.0)
        mip.entries(rows[classes], labels, -1.0)
