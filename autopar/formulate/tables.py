"""Prices on the labels of a layer: the numbers that elimination minimises.

For a mode (ZeRO level over some data axes, recomputation or not, a price per byte held) the cost of a labelling is

    microbatches * (forward + backward [+ forward again]) + parameter synchronisation + optimizer + price * bytes

The bytes counted are parameters, states and gradients exactly, and each saved activation once: with the price as a
Lagrange multiplier the minimum is a lower bound on any plan under a byte limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.engine.label_graph import LabelGraph
from autopar.formulate.call_prices import CallPrices
from autopar.formulate.kept import recomputed_bytes, saved_bytes
from autopar.formulate.labels import LabelSpace, at_cut
from autopar.formulate.relayout_prices import RelayoutPrices
from autopar.formulate.runs import Surroundings
from autopar.plan import MeshAxis

Array = NDArray[np.float64]

Price: TypeAlias = tuple[float, int, float]
"""Seconds a byte costs, microbatches in flight, and the weight of seconds once a step."""


@dataclass(frozen=True)
class Mode:
    """What is the same for a whole layer: ZeRO level and the axes it shards over, recomputation, prices.

    The cost of a labelling is `second_weight` times its seconds plus `byte_price` times its bytes, saved activations
    counting `in_flight` times, seconds once a step also times `once_weight`.
    """

    zero: int
    data_axes: tuple[int, ...]
    recompute: bool
    byte_price: float
    second_weight: float = 1.0
    in_flight: int = 1
    once_weight: float = 1.0

    @property
    def price(self) -> Price:
        """What the bytes and seconds count."""
        return self.byte_price, self.in_flight, self.once_weight


@dataclass(frozen=True)
class Setting:
    """What a scenario fixes: the mesh, samples of a global microbatch and how many of them make a step.

    `staged`: whether it is one stage of several. Gradients are then whole, whatever ZeRO, until the step ends.
    """

    mesh: tuple[MeshAxis, ...]
    batch: int
    num_microbatches: int
    staged: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(axis.size for axis in self.mesh)


@dataclass
class SpaceCosts:
    """Seconds and bytes of one microbatch on the labels of a space; `pair` entries are (forward, backward).

    `saved_bytes`: kept for the backward; `recomputed_bytes`: on entry and exit labels, if the layer is recomputed.
    """

    space: LabelSpace
    forward: list[Array]
    backward: list[Array]
    saved_bytes: list[Array]
    recomputed_bytes: tuple[Array, Array]
    pair: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict)

    def add_pair(self, source: int, target: int, forward: Array, backward: Array) -> None:
        """Add a cost between two variables (or, if they are one, on its labels)."""
        if source == target:
            self.forward[source] = self.forward[source] + np.diagonal(forward)
            self.backward[source] = self.backward[source] + np.diagonal(backward)
            return
        old = self.pair.get((source, target), (0.0, 0.0))
        self.pair[source, target] = (old[0] + forward, old[1] + backward)


def space_costs(
    space: LabelSpace, around: Surroundings, setting: Setting, calls: CallPrices, relayouts: RelayoutPrices
) -> SpaceCosts:
    """Price every label and every pair of labels of a layer at the setting's microbatch."""
    zeros = [np.zeros(len(v)) for v in space.variables]
    kept, inputs = saved_bytes(space, around, setting.batch), recomputed_bytes(space, around, setting.batch)
    costs = SpaceCosts(space, list(zeros), list(zeros), kept, inputs)
    for placed, ahead, back in calls.of(space, setting.batch, setting.mesh):
        costs.forward[placed.variable] = costs.forward[placed.variable] + ahead
        costs.backward[placed.variable] = costs.backward[placed.variable] + back
    for edge in space.edges:
        sources, targets = edge.source.layouts, edge.target.layouts
        forward, backward = relayouts.table(space.layer.values[edge.value], sources, targets, setting.batch)
        costs.add_pair(edge.source.variable, edge.target.variable, forward, backward)
    return costs


def passing_seconds(space: LabelSpace, around: Surroundings, setting: Setting, relayouts: RelayoutPrices) -> Array:
    """Seconds of relaying the values that pass the layer by, for each pair of states, shape (entry, exit)."""
    before, behind = space.variables[space.entry].layouts, space.variables[space.exit].layouts
    total = np.zeros((len(before), len(behind)))
    for value in around.passing:
        sources = at_cut(value.spec, around.entry, before, value.main_in_front)
        targets = at_cut(value.spec, around.leave, behind, value.main_behind)
        total += sum(relayouts.table(value.spec, sources, targets, setting.batch))
    return total


# --- modes --------------------------------------------------------------------------------------------------------


def label_graph(
    costs: SpaceCosts,
    passing: Array,
    setting: Setting,
    modes: Sequence[Mode],
    stored: Iterable[tuple[int, Array]],
) -> LabelGraph:
    """The labelling problem of a layer with one scenario for each mode; entry, exit and tied variables stay open.

    `passing` (entry, exit) are the seconds that values passing the layer by take, `stored` are variables with what
    keeping parameters costs on their labels in each mode (`storing.py`).
    """
    space = costs.space
    weights = setting.num_microbatches * np.array([mode.second_weight for mode in modes])
    again = weights * np.array([1.0 + mode.recompute for mode in modes])
    prices = np.array([mode.byte_price * mode.in_flight for mode in modes])
    rerun = np.array([mode.recompute for mode in modes])
    unary: dict[int, Array] = {}
    for v in range(len(space.variables)):
        run = again[:, None] * costs.forward[v] + weights[:, None] * costs.backward[v]
        unary[v] = run + (prices * ~rerun)[:, None] * costs.saved_bytes[v]
    for v, kept in zip((space.entry, space.exit), costs.recomputed_bytes, strict=True):
        unary[v] = unary[v] + (prices * rerun)[:, None] * kept
    for v, kept in stored:
        unary[v] = unary[v] + kept
    once, twice = weights[:, None, None], again[:, None, None]
    pair = {key: twice * forward + once * backward for key, (forward, backward) in costs.pair.items()}
    ends = (space.entry, space.exit)
    pair[ends] = pair.get(ends, 0.0) + once * passing[None]
    sizes = tuple(len(v) for v in space.variables)
    return LabelGraph(sizes, dict(unary), dict(pair), (space.entry, space.exit, *space.tied))
