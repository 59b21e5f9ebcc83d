"""Labellings near the minimum against trying all: also those that no price for bytes makes cheapest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.engine.eliminate import eliminate
from autopar.engine.exhaustive import labelling_cost
from autopar.engine.label_graph import Costs, LabelGraph
from autopar.engine.near import near_labellings
from tests.engine.test_labels import label_graphs
from tests.examples import examples

Figures = tuple[float, ...]
"""Seconds, static bytes and activation bytes of a labelling."""


@examples(60)
@given(label_graphs(), st.integers(0, 4))
def test_all_that_are_near(graph: LabelGraph, slack: int) -> None:
    """Just the labellings within the slack, each with what it costs above the least."""
    solved = eliminate(graph)
    for k, *kept in np.argwhere(np.isfinite(solved.table)).tolist():
        least = float(solved.table[(k, *kept)])
        rest = [range(n) if v not in graph.keep else (kept[graph.keep.index(v)],) for v, n in enumerate(graph.sizes)]
        wanted = {x: labelling_cost(graph, k, x) - least for x in product(*rest)}
        labels, above = near_labellings(solved, k, kept, slack)
        found = dict(zip(map(tuple, labels.tolist()), above.tolist(), strict=True))
        assert found == {x: cost for x, cost in wanted.items() if cost <= slack}
        assert above.tolist() == sorted(above)


def test_only_the_best_of_many() -> None:
    """Of 3**4 labellings of free variables the 5 cheapest are kept: costs 0, 1, 1, 1, 1."""
    graph = LabelGraph((3,) * 4, {v: np.arange(3.0)[None] for v in range(4)})
    _, above = near_labellings(eliminate(graph), 0, (), 9.0, most=5)
    assert above.tolist() == [0, 1, 1, 1, 1]


@st.composite
def measured_graphs(draw: st.DrawFn) -> tuple[LabelGraph, LabelGraph, LabelGraph]:
    """Seconds, static bytes and activation bytes of the same layer of up to five variables: a chain and some more."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = int(rng.integers(2, 6))
    sizes = tuple(int(s) for s in rng.integers(2, 4, n))
    pairs = [(i, j) for i in range(n) for j in range(i) if i == j + 1 or rng.random() < 0.2]

    def figures(high: int) -> LabelGraph:
        def table(*shape: int) -> Costs:
            drawn: Costs = rng.integers(0, high, (1, *shape)).astype(float)
            return drawn

        return LabelGraph(
            sizes, {v: table(s) for v, s in enumerate(sizes)}, {p: table(sizes[p[0]], sizes[p[1]]) for p in pairs}
        )

    return figures(20), figures(8), figures(8)


def front(points: set[Figures]) -> set[Figures]:
    """Those that no other is at most as large as everywhere."""
    return {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}


def priced(graphs: tuple[LabelGraph, LabelGraph, LabelGraph], prices: tuple[float, float]) -> LabelGraph:
    """Seconds with a price on either kind of bytes."""
    seconds, static, saved = graphs
    x, y = prices
    unary = {v: seconds.unary[v] + x * static.unary[v] + y * saved.unary[v] for v in seconds.unary}
    pair = {p: seconds.pair[p] + x * static.pair[p] + y * saved.pair[p] for p in seconds.pair}
    return replace(seconds, unary=unary, pair=pair)


@examples(40)
@given(measured_graphs())
def test_pareto_front_of_a_layer(graphs: tuple[LabelGraph, LabelGraph, LabelGraph]) -> None:
    """The labellings near the cheapest hold the whole front of seconds, static and activation bytes that trying all
    finds; those cheapest at some price are but its convex hull."""
    sizes = graphs[0].sizes
    every = {tuple(labelling_cost(g, 0, x) for g in graphs) for x in product(*map(range, sizes))}
    wanted = front(every)
    found: set[Figures] = set()
    for prices in ((0.0, 0.0), (1.0, 1.0)):
        solved = eliminate(priced(graphs, prices))
        least = float(solved.table[0])
        reach = max(p[0] + prices[0] * p[1] + prices[1] * p[2] for p in wanted) - least
        labels, _ = near_labellings(solved, 0, (), reach)
        points = {tuple(labelling_cost(g, 0, x) for g in graphs) for x in labels.tolist()}
        assert wanted <= points
        found |= points
    assert front(found) == wanted
