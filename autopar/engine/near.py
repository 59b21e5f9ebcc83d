"""All labellings of a label graph whose cost is near the minimum, best first.

The tables of an elimination are exact costs to go: what a label adds above the best one of its variable, given the
labels of its neighbours, is what the labelling loses by it (D. Eppstein: k-best enumeration, 2014). Labellings that no
price for bytes makes cheapest, as they lie inside the convex hull of seconds and bytes, are found so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.engine.eliminate import Elimination
from autopar.engine.label_graph import Costs, Labels


def near_labellings(
    solved: Elimination, k: int, kept: Sequence[int], slack: float, most: int = 1 << 16
) -> tuple[Labels, Costs]:
    """Labellings (N, V) that cost at most `slack` above `solved.table[k, *kept]`, and by how much (N,), sorted.

    They are all there are where these are at most `most` and the elimination is exact; else the best that were met.
    """
    labels = np.zeros((1, len(solved.sizes)), dtype=np.intp)
    labels[:, list(solved.keep)] = np.array(kept, dtype=np.intp)
    above = np.zeros(1)
    for variable, factors in reversed(solved.steps):
        ks = np.full(len(labels), k)
        costs = sum((f.at(ks, labels, variable) for f in factors), np.zeros((1, solved.sizes[variable])))
        loss = above[:, None] + costs - costs.min(axis=1, keepdims=True)
        rows, chosen = np.nonzero(loss <= slack)
        found = loss[rows, chosen]
        best = np.argsort(found, kind="stable")[:most]
        labels, above = labels[rows[best]], found[best]
        labels[:, variable] = chosen[best]
    return labels, above
