"""Elimination and the integer program against brute force on random label graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.engine.eliminate import eliminate
from autopar.engine.errors import ProblemError, TooWide
from autopar.engine.exhaustive import labelling_cost, minimum_table
from autopar.engine.label_graph import Costs, LabelGraph
from autopar.engine.label_ilp import best_labelling
from tests.examples import examples


@st.composite
def label_graphs(draw: st.DrawFn) -> LabelGraph:
    """Up to six variables of up to three labels; few distinct costs, so equal rows and infs are frequent.

    Edges may be missing (the graph falls apart), given both ways round, or lead from a variable to itself.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, scenarios = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    sizes = tuple(int(s) for s in rng.integers(1, 4, n))

    def table(*shape: int) -> Costs:
        costs = rng.integers(0, 4, (int(rng.choice([1, scenarios])), *shape))
        legal: Costs = np.where(rng.random(costs.shape) < 0.1, np.inf, costs)
        return legal.astype(np.float32) if rng.random() < 0.5 else legal

    unary = {v: table(sizes[v]) for v in range(n) if rng.random() < 0.7}
    density = rng.random()
    pair = {(i, j): table(sizes[i], sizes[j]) for i in range(n) for j in range(n) if rng.random() < density}
    keep = tuple(int(v) for v in rng.permutation(n)[: rng.integers(0, min(3, n + 1))])
    return LabelGraph(sizes, unary, pair, keep)


@examples(150)
@given(label_graphs())
def test_elimination_equals_brute_force(graph: LabelGraph) -> None:
    """The table is the minimum for every scenario and kept labelling, and decoding reaches it."""
    solved = eliminate(graph)
    np.testing.assert_allclose(solved.table, minimum_table(graph), rtol=1e-12)
    for at in np.argwhere(np.isfinite(solved.table)):
        k, kept = int(at[0]), tuple(int(x) for x in at[1:])
        labels = solved.decode(k, kept)
        assert tuple(labels[v] for v in graph.keep) == kept
        assert labelling_cost(graph, k, labels) == pytest.approx(solved.table[(k, *kept)])


@examples(40)
@given(label_graphs())
def test_integer_program_equals_elimination(graph: LabelGraph) -> None:
    """Both solvers agree on the least cost over all kept labels, and the program's labels reach it."""
    table = eliminate(graph).table
    for k in range(graph.scenarios):
        found = best_labelling(graph, k)
        assert found.cost == pytest.approx(table[k].min(), rel=1e-6)
        if found.labels is not None:
            assert labelling_cost(graph, k, found.labels) == pytest.approx(found.cost, rel=1e-6)


def test_integer_program_with_kept_labels() -> None:
    """With kept labels given, the program solves that one entry of the table: here 5 + 1 and 0 + 3."""
    graph = LabelGraph((2, 2), {0: np.array([[5.0, 0.0]])}, {(0, 1): np.array([[[1.0, 9.0], [8.0, 3.0]]])}, keep=(0,))
    assert [best_labelling(graph, 0, (label,)).cost for label in (0, 1)] == pytest.approx([6.0, 3.0])


def test_a_hub_of_many_without_a_choice() -> None:
    """A variable tied to 80 that have one label each costs the least of the sums of its rows."""
    tables = np.random.default_rng(0).random((80, 3, 1))
    graph = LabelGraph((3, *[1] * 80), {}, {(0, i + 1): t[None] for i, t in enumerate(tables)}, keep=(1,))
    assert eliminate(graph).table[0] == pytest.approx(tables.sum(axis=0).min())


def test_long_chain_is_exact() -> None:
    """A chain of 40 variables equals the product of its min-plus matrices."""
    rng = np.random.default_rng(0)
    tables = [rng.random((5, 5)) for _ in range(39)]
    product = tables[0]
    for table in tables[1:]:
        product = (product[:, :, None] + table[None]).min(axis=1)
    graph = LabelGraph((5,) * 40, {}, {(i, i + 1): t[None] for i, t in enumerate(tables)}, keep=(0, 39))
    np.testing.assert_allclose(eliminate(graph).table[0], product)


def test_too_wide_names_the_size() -> None:
    """Eliminating from a clique of five variables of ten labels needs a table of 10**4 entries at least."""
    rng = np.random.default_rng(0)
    pair: dict[tuple[int, int], Costs] = {(i, j): rng.random((1, 10, 10)) for i in range(5) for j in range(i)}
    with pytest.raises(TooWide, match="10000 entries; at most 9999") as caught:
        eliminate(LabelGraph((10,) * 5, {}, pair), max_entries=9999)
    assert caught.value.entries == 10000


def test_relaxed_where_too_wide() -> None:
    """A clique whose tables are split gives a lower bound of the minimum, and a labelling that costs no less."""
    rng = np.random.default_rng(0)
    pair: dict[tuple[int, int], Costs] = {(i, j): rng.random((1, 5, 5)) for i in range(5) for j in range(i)}
    graph = LabelGraph((5,) * 5, {}, pair)
    relaxed, least = eliminate(graph, 100, 100), float(eliminate(graph).table[0])
    labels = relaxed.decode(0)
    cost = sum(float(table[0, labels[i], labels[j]]) for (i, j), table in pair.items())
    assert not relaxed.exact
    assert float(relaxed.table[0]) <= least <= cost < least + 1


def test_no_legal_labelling() -> None:
    """Where nothing is legal the table holds inf, decoding refuses, and the program has no labels."""
    graph = LabelGraph((2,), {0: np.array([[np.inf, np.inf]])})
    assert eliminate(graph).table.tolist() == [np.inf]
    assert best_labelling(graph).labels is None
    with pytest.raises(ProblemError, match="no legal labelling"):
        eliminate(graph).decode(0)


def test_bad_tables_are_refused() -> None:
    """Shapes that don't fit, NaN and unknown variables are named."""
    with pytest.raises(ProblemError, match=r"shape \(1, 3\)"):
        LabelGraph((2,), {0: np.zeros((1, 3))})
    with pytest.raises(ProblemError, match="NaN"):
        LabelGraph((1,), {0: np.array([[np.nan]])})
    with pytest.raises(ProblemError, match=r"keep is \(4,\)"):
        LabelGraph((2,), keep=(4,))
