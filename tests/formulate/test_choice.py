"""The minimum inside a layer against trying everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from autopar.cost.roofline import RooflinePricer
from autopar.engine.eliminate import eliminate
from autopar.formulate.layers.runs import LayerRun, Surroundings
from autopar.formulate.layers.states import combine
from autopar.formulate.layers.tables import Setting
from autopar.formulate.mesh import mesh_of
from autopar.formulate.pins import Pins
from autopar.graph import BROADCAST, PARTIAL, REPLICATE, Extent, LayerClass, Layout, Op, Ref, TensorSpec
from autopar.plan import LayerStrategy
from autopar.shard.rules import assignments, layouts_of, rule_for
from tests.cost.small import cluster, feed_forward
from tests.formulate.cases import Laid, lay_out, step_s

SAMPLES = 400


def gated(width: int) -> LayerClass:
    """out = x + gelu(x @ w.T) with x of (batch, width)."""
    rows = TensorSpec((Extent(1), Extent(0, width)), "float32", True)
    values = {"w": TensorSpec((Extent(0, width),) * 2, "float32", True), **dict.fromkeys(("x", "h", "a", "out"), rows)}
    ops = tuple(
        Op(result, target, tuple(map(Ref, operands)), (), (result,), (None,))
        for result, target, operands in (
            ("h", "aten.linear.default", ("x", "w")),
            ("a", "aten.gelu.default", ("h",)),
            ("out", "aten.add.Tensor", ("x", "a")),
        )
    )
    return LayerClass(("x",), ("w",), (), ops, ("out",), values)


def laid(layer: LayerClass, sizes: tuple[int, ...], batch: int, microbatches: int) -> Laid:
    """The layer between two others, laid out on devices that span a slow link."""
    main, owned = layer.values["x"], (True,) * len(layer.params)
    around = Surroundings(0, main, main, "x", "out", False, False, (), owned, (), False, Pins(), Pins())
    run = LayerRun(0, 1, around, frozenset(), layer)
    return lay_out(run, Setting(mesh_of(sizes), batch, microbatches), RooflinePricer(cluster(2, 2)))


def wanted_storage(laid: Laid, ops: dict[str, tuple[str, ...]]) -> dict[str, Layout]:
    """Parameters stored as the op that reads them wants them, never partial."""
    layer, found = laid.run.layer, {}
    for op in layer.ops:
        rule = rule_for(op, layer)
        assert rule is not None
        operands, _ = layouts_of(rule, op, layer, ops[op.name])
        for name, layout in zip(op.operands, operands, strict=True):
            if name in layer.params:
                found[name] = tuple(REPLICATE if p == PARTIAL else p for p in layout)
    return found


@dataclass(frozen=True)
class Everything:
    """All there is to choose: states at the cuts, a layout to relay `x` to (None: as it comes), assignments of ops."""

    laid: Laid
    states: tuple[Layout, ...]
    relays: tuple[Layout | None, ...]
    ops: dict[str, tuple[tuple[str, ...], ...]]

    def strategy(self, entry: Layout, leave: Layout, relay: Layout | None, *ops: tuple[str, ...]) -> LayerStrategy:
        """The strategy of one choice of each."""
        chosen = dict(zip(self.ops, ops, strict=True))
        stored = wanted_storage(self.laid, chosen)
        return LayerStrategy(entry, leave, chosen, stored if relay is None else stored | {"x": relay})

    def sources(self) -> list[Sequence[Any]]:
        """What `strategy` takes one of each."""
        return [self.states, self.states, self.relays, *self.ops.values()]


def everything(laid: Laid) -> Everything:
    """Any assignment of every op: those that follow what they read in the search are free here."""
    layer, sizes, batch = laid.run.layer, laid.setting.sizes, laid.setting.batch
    spec = layer.values["x"]
    placements = [[*range(len(spec.shape)), REPLICATE, BROADCAST]] * len(sizes)
    rules = {op: rule_for(op, layer) for op in layer.ops}
    return Everything(
        laid,
        laid.space.variables[laid.space.entry].layouts,
        (None, *combine(spec, placements, sizes, batch)),
        {op.name: assignments(rule, op, layer, sizes, batch) for op, rule in rules.items() if rule is not None},
    )


def test_elimination_finds_the_least_of_everything() -> None:
    """For each pair of states the table holds the cost of the cheapest of all strategies, tried one by one: letting
    elementwise ops follow what they read loses nothing."""
    layer = laid(gated(4096), (2,), 64, 2)
    solved, free = eliminate(layer.graph), everything(layer)
    least: dict[tuple[Layout, Layout], float] = defaultdict(lambda: np.inf)
    for choice in product(*free.sources()):
        ends = choice[:2]
        least[ends] = min(least[ends], step_s(layer, free.strategy(*choice)))
    assert layer.modes[0].zero == 0
    for (i, entry), (j, leave) in product(enumerate(free.states), enumerate(free.states)):
        assert solved.table[0, i, j] == pytest.approx(least[entry, leave], rel=1e-9)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_nothing_at_random_is_cheaper(sizes: tuple[int, ...]) -> None:
    """No random strategy of a feed-forward layer beats the entry of the table at its states, in any mode of its own."""
    rng = np.random.default_rng(2)
    layer = laid(feed_forward(), sizes, 16, 2)
    solved, free = eliminate(layer.graph), everything(layer)
    for _ in range(SAMPLES):
        choice = [options[int(rng.integers(len(options)))] for options in free.sources()]
        k = int(rng.integers(len(layer.modes)))
        mode, ends = layer.modes[k], [free.states.index(state) for state in choice[:2]]
        strategy = replace(free.strategy(*choice), zero=mode.zero, recompute=mode.recompute)
        if mode.zero == 0 or strategy.data_axes(0) == mode.data_axes:
            assert step_s(layer, strategy) >= solved.table[(k, *ends)] * (1 - 1e-9)
