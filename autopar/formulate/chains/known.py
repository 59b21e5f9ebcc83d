"""What the scenarios of a search over one model share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autopar.cost.pricer import Pricer
from autopar.cost.storages import Storages
from autopar.formulate.chains.siblings import Siblings
from autopar.formulate.layers.call_prices import CallPrices
from autopar.formulate.layers.labels import LabelSpace
from autopar.formulate.layers.layer_tables import LayerSolver
from autopar.formulate.layers.rates import ParameterRates
from autopar.formulate.layers.relayout_prices import RelayoutPrices
from autopar.formulate.layers.runs import LayerRun, Surroundings, layer_runs
from autopar.formulate.pins import Pins
from autopar.graph import OpGraph
from autopar.plan import MeshAxis

PROGRAMS = 1 << 9
"""Lowered programs that are kept: some 50 KiB each."""


class Known:
    """What the scenarios of a search over one model share: runs, prices, choices laid out before, siblings.

    `spaces`: by surroundings, mesh and, where it isn't for all batches, the batch. `programs`: of a space, its labels
    and a kind of recomputation, in storages.
    """

    def __init__(self, pricer: Pricer) -> None:
        self.calls = CallPrices(pricer)
        self.spaces: dict[tuple[Surroundings, tuple[int, ...], int], LabelSpace] = {}
        self.solvers: dict[tuple[LabelSpace, Surroundings], LayerSolver] = {}
        self.siblings: dict[object, Siblings] = {}
        self.rates: dict[object, ParameterRates] = {}
        self.programs = lru_cache(maxsize=PROGRAMS)(_program)
        self._pricer = pricer
        self._runs: dict[tuple[tuple[Pins, ...], bool], tuple[LayerRun, ...]] = {}
        self._relayouts: dict[tuple[MeshAxis, ...], RelayoutPrices] = {}

    def relayouts(self, mesh: tuple[MeshAxis, ...]) -> RelayoutPrices:
        """Prices of layout changes on a mesh."""
        return self._relayouts.setdefault(mesh, RelayoutPrices(self._pricer, mesh))

    def priced(self, pricer: Pricer) -> Known:
        """What is known whatever things cost, with calls at another's prices."""
        other = Known(pricer)
        other.spaces, other.programs, other.solvers, other._runs = self.spaces, self.programs, self.solvers, self._runs
        return other

    def runs(self, graph: OpGraph, pins: Sequence[Pins], staged: bool = False) -> tuple[LayerRun, ...]:
        """The model's runs of equal layers under limits (`layer_runs`)."""
        key = (tuple(pins), staged)
        if key not in self._runs:
            self._runs[key] = layer_runs(graph, pins, staged)
        return self._runs[key]


def _program(space: LabelSpace, labels: tuple[int, ...], recompute: str) -> Storages:
    return Storages(space.lowered(labels, recompute))
