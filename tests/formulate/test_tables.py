"""The tables that elimination minimises against the lowered program of what it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autopar.engine.eliminate import eliminate
from autopar.engine.label_graph import Costs, LabelGraph
from autopar.formulate.layers.call_prices import CallPrices
from autopar.formulate.layers.labels import label_space
from autopar.formulate.layers.tables import Setting, least_of
from autopar.formulate.mesh import mesh_of
from autopar.shard.relayout import held_layout
from tests.formulate.cases import Laid, laid_out, legal_entries, step_s

SAMPLES, NOISES, LABELLINGS = 12, 3, 4


def labelling_s(graph: LabelGraph, mode: int, labels: Sequence[int]) -> float:
    """The sum of all costs of a labelling in a mode."""
    at = [table[(min(mode, len(table) - 1), *(labels[v] for v in scope))] for scope, table in graph.tables()]
    return float(np.sum(at))


def has_repeats(laid: Laid, labels: Sequence[int]) -> bool:
    """Whether two consumers ask for the same change of layout, which a program makes once."""
    changes = []
    for edge in laid.space.edges:
        ends = [home.layouts[labels[home.variable]] for home in (edge.source, edge.target)]
        trained = laid.run.layer.values[edge.value].requires_grad
        ends = [x if trained or x is None else held_layout(x) for x in ends]
        changes += [(edge.value, *ends)] if ends[0] != ends[1] else []
    return len(set(changes)) < len(changes)


def noise(graph: LabelGraph, rng: np.random.Generator) -> dict[int, Costs]:
    """Unary costs that are legal where the graph's are, and otherwise random and large."""
    return {
        v: np.where(np.isfinite(table), rng.exponential(1.0, table.shape), np.inf) for v, table in graph.unary.items()
    }


MODELS = [
    ("mlp", "4xa100-80gb", (2, 2)),
    ("gpt", "4xa100-80gb", (2, 2)),
    ("llama", "2xa100-80gb", (2,)),
    ("tied", "2xa100-80gb", (2,)),
    ("llama", "2x8xa100-80gb", (2, 8)),
]


def assert_priced(laid: Laid, mode: int, labels: Sequence[int], cost_s: float) -> None:
    """The program costs `cost_s`; less only where it shares a change of layout that the labels count twice."""
    exact = step_s(laid, laid.strategy(mode, labels))
    assert exact <= cost_s * (1 + 1e-9)
    if not has_repeats(laid, labels):
        assert exact == pytest.approx(cost_s, rel=1e-9)


@pytest.mark.parametrize(("model", "cluster", "sizes"), MODELS)
def test_table_is_price_of_lowered_program(model: str, cluster: str, sizes: tuple[int, ...]) -> None:
    """Every entry of the table decodes to a strategy that lowers, and whose program costs just that."""
    rng = np.random.default_rng(0)
    for laid in laid_out(model, cluster, Setting(mesh_of(sizes), 32, 3)):
        solved = eliminate(laid.graph)
        for k, *kept in rng.permutation(legal_entries(solved))[:SAMPLES].tolist():
            assert_priced(laid, k, solved.decode(k, kept), float(solved.table[(k, *kept)]))


def test_what_two_ops_read_is_relaid_once() -> None:
    """Two products of one elementwise result may read it where a change of layout put it for both, at its price."""
    for laid in laid_out("paired", "4xa100-80gb", Setting(mesh_of((2, 2)), 32, 3)):
        sources = {laid.space.variables[e.source.variable].name for e in laid.space.edges if "first" in e.readers}
        assert sources <= {"tanh"}
        solved = eliminate(laid.graph)
        for k, *kept in legal_entries(solved).tolist():
            exact = step_s(laid, laid.strategy(k, solved.decode(k, kept)))
            assert exact == pytest.approx(float(solved.table[(k, *kept)]), rel=1e-9)


@pytest.mark.parametrize(("model", "cluster", "sizes"), MODELS)
def test_any_labelling_is_priced_as_it_lowers(model: str, cluster: str, sizes: tuple[int, ...]) -> None:
    """Random legal labellings, most of them bad, lower and cost what their programs cost."""
    rng = np.random.default_rng(1)
    for laid in laid_out(model, cluster, Setting(mesh_of(sizes), 32, 3)):
        for _ in range(NOISES):
            solved = eliminate(replace(laid.graph, unary=noise(laid.graph, rng)))
            for k, *kept in rng.permutation(legal_entries(solved))[:LABELLINGS].tolist():
                labels = solved.decode(k, kept)
                assert_priced(laid, k, labels, labelling_s(laid.graph, k, labels))


def test_least_seconds_where_labels_are_illegal() -> None:
    """Of 2 samples 4 devices can't each have one: what no device may do leaves the least seconds of a pass numbers."""
    for laid in laid_out("mlp", "4xa100-80gb", Setting(mesh_of((2, 2)), 4, 1)):
        space = label_space(laid.run.layer, laid.run.around, (2, 2), 4)
        calls = list(CallPrices(laid.pricer).of(space, [4, 2], laid.setting.mesh))
        assert any(np.isinf(behind[1]).any() for _, _, behind in calls)
        for least in least_of(space, calls, 2):
            assert 0 <= least.inputs_s <= least.backward_s <= least.both_s
