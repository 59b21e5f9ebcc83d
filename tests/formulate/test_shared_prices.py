"""What the search leaves out or uses twice, against doing everything anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost.roofline import RooflinePricer
from autopar.engine.eliminate import eliminate
from autopar.engine.label_graph import Costs
from autopar.formulate.layers.call_prices import CallPrices
from autopar.formulate.layers.labels import label_space
from autopar.formulate.layers.ladder import NO_TIME, ONLY_BYTES
from autopar.formulate.layers.layer_tables import Ask, LayerSolver
from autopar.formulate.layers.mode_costs import Part, label_graph
from autopar.formulate.layers.relayout_prices import RelayoutPrices
from autopar.formulate.layers.runs import layer_runs
from autopar.formulate.layers.storing import storage_costs
from autopar.formulate.layers.tables import Price, Setting, passing_seconds, space_costs
from autopar.formulate.mesh import mesh_of
from autopar.formulate.pins import Pins
from tests.formulate.cases import Laid, cluster_of, laid_out, traced

PRICES: list[Price] = [(0.0, 1, 1.0), (1e-12, 1, 1.0), (1e-10, 2, 0.0), (ONLY_BYTES, 1, 1.0)]


@pytest.mark.parametrize("model", ["llama", "tied"])
def test_dominated_modes_are_never_cheapest(model: str) -> None:
    """Tables made for bounds, several settings and all states with the same data axes at once, hold at every price the
    least cost that elimination finds in any mode of that price, everything priced apart."""
    settings = [Setting(mesh_of((2, 2)), batch, 128 // batch) for batch in (32, 64)]
    laid = [list(laid_out(model, "4xa100-80gb", setting)) for setting in settings]
    for same in zip(*laid, strict=True):
        asks = [ask_of(one) for one in same]
        found = LayerSolver(same[0].space, same[0].run.around).solve(asks)
        for one, tables in zip(same, found, strict=True):
            missing = [mode for mode, table in zip(tables.modes, tables.table, strict=True) if np.isinf(table).all()]
            assert missing
            for kind, table in least(one).items():
                price, zero = kind
                mine = tables.costs(price, None, -1 if zero is None else zero)[1].min(axis=0)
                np.testing.assert_allclose(mine, table, rtol=1e-12)


def ask_of(laid: Laid) -> Ask:
    """What bounds ask for."""
    relayouts = RelayoutPrices(laid.pricer, laid.setting.mesh)
    passing = passing_seconds(laid.space, laid.run.around, laid.setting, relayouts)
    costs = space_costs(laid.space, [laid.run.around], laid.setting, CallPrices(laid.pricer), relayouts)
    return Ask(costs, passing, laid.setting, laid.rates, PRICES, ((), ()), True)


def least(laid: Laid) -> dict[tuple[Price, int | None], Costs]:
    """The table of least costs at every price, and where parameters are tied at every ZeRO level."""
    modes = [
        replace(
            mode, byte_price=price, in_flight=count, once_weight=once,
            second_weight=NO_TIME if price == ONLY_BYTES else 1.0,
        )
        for price, count, once in PRICES
        for mode in laid.modes
    ]  # fmt: skip
    ask = ask_of(laid)
    stored = storage_costs(laid.space, laid.run.around, laid.setting, modes, laid.rates)
    table = eliminate(label_graph([Part(ask.costs, ask.passing, laid.setting, modes, stored)])).table
    kinds = [(mode.price, mode.zero if laid.space.tied else None) for mode in modes]
    return {kind: table[[k == kind for k in kinds]].min(axis=0) for kind in kinds}


@pytest.mark.parametrize("model", ["mlp", "llama"])
def test_calls_priced_on_other_meshes_before(model: str) -> None:
    """Seconds of calls are the same whether calls that are split alike were priced on other meshes before or not."""
    graph, pricer = traced(model), RooflinePricer(cluster_of("2x8xa100-80gb"))
    known = CallPrices(pricer)
    for sizes in ((2, 8), (4, 4), (8, 2), (16,)):
        for run in layer_runs(graph, [Pins()] * len(graph.layers)):
            space, mesh = label_space(run.layer, run.around, sizes, 32), mesh_of(sizes)
            for own, shared in zip(CallPrices(pricer).of(space, [32], mesh), known.of(space, [32], mesh), strict=True):
                np.testing.assert_array_equal(own[1:], shared[1:])
