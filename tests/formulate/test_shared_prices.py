"""What the search leaves out or uses twice, against doing everything anew."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost.roofline import RooflinePricer
from autopar.engine.eliminate import eliminate
from autopar.engine.label_graph import Costs
from autopar.formulate.call_prices import CallPrices
from autopar.formulate.labels import label_space
from autopar.formulate.ladder import ONLY_BYTES, modes_of
from autopar.formulate.mesh import mesh_of
from autopar.formulate.pins import Pins
from autopar.formulate.relayout_prices import RelayoutPrices
from autopar.formulate.runs import layer_runs
from autopar.formulate.storing import storage_costs, undominated
from autopar.formulate.tables import Mode, Price, Setting, label_graph, passing_seconds, space_costs
from tests.formulate.cases import Laid, cluster_of, laid_out, traced

PRICES: list[Price] = [(0.0, 1, 1.0), (1e-12, 1, 1.0), (1e-10, 2, 0.0), (ONLY_BYTES, 1, 1.0)]


def least(laid: Laid, modes: list[Mode]) -> dict[object, Costs]:
    """The table of least costs at every price, and where parameters are tied at every ZeRO level."""
    around, relayouts = laid.run.around, RelayoutPrices(laid.pricer, laid.setting.mesh)
    costs = space_costs(laid.space, around, laid.setting, CallPrices(laid.pricer), relayouts)
    passing = passing_seconds(laid.space, around, laid.setting, relayouts)
    stored = storage_costs(laid.space, around, laid.setting, modes, laid.rates)
    table = eliminate(label_graph(costs, passing, laid.setting, modes, stored)).table
    kinds = [(mode.price, mode.zero if laid.space.tied else None) for mode in modes]
    return {kind: table[[k == kind for k in kinds]].min(axis=0) for kind in kinds}


@pytest.mark.parametrize("model", ["llama", "tied"])
def test_dominated_modes_are_never_cheapest(model: str) -> None:
    """Without dominated modes the least cost at every price is what it is with all."""
    for laid in laid_out(model, "4xa100-80gb", Setting(mesh_of((2, 2)), 32, 4)):
        every = list(modes_of(laid.run.around, laid.space, PRICES))
        few = undominated(laid.space, laid.run.around, laid.setting, every, laid.rates)
        assert len(few) < len(every)
        wanted, found = least(laid, every), least(laid, few)
        assert wanted.keys() == found.keys()
        for kind, table in wanted.items():
            np.testing.assert_allclose(found[kind], table, rtol=1e-12)


@pytest.mark.parametrize("model", ["mlp", "llama"])
def test_calls_priced_on_other_meshes_before(model: str) -> None:
    """Seconds of calls are the same whether calls that are split alike were priced on other meshes before or not."""
    graph, pricer = traced(model), RooflinePricer(cluster_of("2x8xa100-80gb"))
    known = CallPrices(pricer)
    for sizes in ((2, 8), (4, 4), (8, 2), (16,)):
        for run in layer_runs(graph, [Pins()] * len(graph.layers)):
            space, mesh = label_space(run.layer, run.around, sizes, 32), mesh_of(sizes)
            for own, shared in zip(CallPrices(pricer).of(space, 32, mesh), known.of(space, 32, mesh), strict=True):
                np.testing.assert_array_equal(own[1:], shared[1:])
