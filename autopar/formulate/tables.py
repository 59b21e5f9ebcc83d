"""Prices on the labels of a layer: the numbers that elimination minimises.

For a mode (ZeRO level over some data axes, recomputation or not, a price per byte held) the cost of a labelling is

    microbatches * (forward + backward [+ forward again]) + parameter synchronisation + optimizer + price * bytes

The bytes counted are parameters, states and gradients exactly, and each saved activation once: with the price as a
Lagrange multiplier the minimum is a lower bound on any plan under a byte limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost.demand import price_demands
from autopar.cost.moves import Piece, relayout_pieces
from autopar.cost.pricer import Pricer
from autopar.cost.program import call_demand
from autopar.engine.label_graph import LabelGraph
from autopar.formulate.kept import call_of, recomputed_bytes, saved_bytes
from autopar.formulate.labels import LabelSpace, Option, Placed, at_cut
from autopar.formulate.rates import ParameterRates
from autopar.formulate.runs import Surroundings
from autopar.graph import Layout, TensorSpec, local_shape
from autopar.plan import MeshAxis, data_axes_of
from autopar.shard.program import Program
from autopar.shard.storage import parameter_storage

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


class RelayoutPrices:
    """Seconds of layout changes on one mesh; each piece of work is asked for once for each size of tensor."""

    def __init__(self, pricer: Pricer, mesh: tuple[MeshAxis, ...]) -> None:
        self._pricer, self._mesh = pricer, mesh
        self._known: dict[tuple[int, str], dict[Piece, float]] = {}

    def table(
        self, spec: TensorSpec, sources: Sequence[Layout | None], targets: Sequence[Layout | None], batch: int
    ) -> tuple[Array, Array]:
        """Forward and backward seconds from each source to each target, shape (sources, targets); inf = illegal."""
        rows, columns = _positions(sources), _positions(targets)
        changes = [None if s is None or t is None else relayout_pieces(s, t, self._mesh) for s in rows for t in columns]
        passes = [[c if c is None else c[way] for c in changes] for way in range(1 + spec.requires_grad)]
        known = self._priced(spec, batch, {p for found in passes for pieces in found if pieces for p in pieces})
        pick = np.ix_([rows[s] for s in sources], [columns[t] for t in targets])
        seconds = [
            np.array(
                [np.inf if c is None else sum(map(known.__getitem__, c)) for c in found], dtype=np.float64
            ).reshape(len(rows), len(columns))[pick]
            for found in passes
        ]
        return seconds[0], seconds[1] if spec.requires_grad else np.where(np.isinf(seconds[0]), np.inf, 0.0)

    def _priced(self, spec: TensorSpec, batch: int, pieces: set[Piece]) -> dict[Piece, float]:
        """Seconds of pieces on tensors of this size."""
        elements, dtype = prod(spec.shape_at(batch)), spec.dtype
        known = self._known.setdefault((elements, dtype), {})
        new = sorted(pieces - known.keys())
        local, sent = [p for p in new if p.is_local], [p for p in new if not p.is_local]
        if local:
            times = self._pricer.ops([p.op_key(elements, dtype) for p in local])
            known.update(zip(local, times.forward_s.tolist(), strict=True))
        if sent:
            moved = self._pricer.collectives([p.collective_key(elements, dtype) for p in sent])
            known.update(zip(sent, moved.seconds.tolist(), strict=True))
        return known


def _positions(layouts: Sequence[Layout | None]) -> dict[Layout | None, int]:
    """Each distinct layout, numbered in order of appearance."""
    return {layout: i for i, layout in enumerate(dict.fromkeys(layouts))}


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
    space: LabelSpace, around: Surroundings, setting: Setting, pricer: Pricer, relayouts: RelayoutPrices
) -> SpaceCosts:
    """Price every label and every pair of labels of a layer at the setting's microbatch."""
    zeros = [np.zeros(len(v)) for v in space.variables]
    kept, inputs = saved_bytes(space, around, setting.batch), recomputed_bytes(space, around, setting.batch)
    costs = SpaceCosts(space, list(zeros), list(zeros), kept, inputs)
    _price_calls(costs, setting, pricer)
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


# --- calls --------------------------------------------------------------------------------------------------------


def _price_calls(costs: SpaceCosts, setting: Setting, pricer: Pricer) -> None:
    space = costs.space
    program = Program(setting.sizes, (), (), (), (), (), {}, space.layer.values)
    pending: list[tuple[Placed, Option]] = []
    for placed in space.placed:
        pending += [(placed, option) for option in dict.fromkeys(placed.options) if option is not None]
    demands = [
        call_demand(call_of(p, o, space.layer), program, space.layer, setting.batch, setting.mesh) for p, o in pending
    ]
    times = price_demands(demands, pricer)
    seconds: dict[tuple[str, Option | None], tuple[float, float]] = {
        (p.op.name, o): (f, b)
        for (p, o), f, b in zip(pending, times.forward_s.tolist(), times.backward_s.tolist(), strict=True)
    }
    for placed in space.placed:
        v = placed.variable
        both = np.array([seconds.get((placed.op.name, o), (np.inf, np.inf)) for o in placed.options]).reshape(-1, 2)
        costs.forward[v] = costs.forward[v] + both[:, 0]
        costs.backward[v] = costs.backward[v] + both[:, 1]


# --- modes --------------------------------------------------------------------------------------------------------


def label_graph(
    costs: SpaceCosts,
    passing: Array,
    around: Surroundings,
    setting: Setting,
    modes: Sequence[Mode],
    rates: ParameterRates,
) -> LabelGraph:
    """The labelling problem of a layer with one scenario for each mode; entry, exit and tied variables stay open.

    `passing` (entry, exit) are the seconds that values passing the layer by take.
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
    for stored in space.stored:
        if around.owned[space.layer.params.index(stored.param)]:
            spec, home = space.layer.values[stored.param], stored.home
            unary[home.variable] = unary[home.variable] + _stored_costs(spec, home.layouts, setting, modes, rates)
    unary[space.entry] = unary[space.entry] + np.array([_entry_cost(space, around, mode) for mode in modes])
    once, twice = weights[:, None, None], again[:, None, None]
    pair = {key: twice * forward + once * backward for key, (forward, backward) in costs.pair.items()}
    ends = (space.entry, space.exit)
    pair[ends] = pair.get(ends, 0.0) + once * passing[None]
    sizes = tuple(len(v) for v in space.variables)
    return LabelGraph(sizes, dict(unary), dict(pair), (space.entry, space.exit, *space.tied))


def _entry_cost(space: LabelSpace, around: Surroundings, mode: Mode) -> list[float]:
    """inf where the mode's data axes are not those of the state."""
    axes = [data_axes_of(state, around.entry.batch_dim) for state in space.variables[space.entry].layouts]
    return [np.inf if mode.zero and found != mode.data_axes else 0.0 for found in axes]


def _stored_costs(
    spec: TensorSpec, layouts: Sequence[Layout | None], setting: Setting, modes: Sequence[Mode], rates: ParameterRates
) -> Array:
    """Seconds (and price times bytes) of keeping a parameter in each layout under each mode, shape (modes, layouts)."""
    elements = [1 if x is None else prod(local_shape(spec.shape_at(1), x, setting.sizes)) for x in layouts]
    found: dict[tuple[int, tuple[int, ...]], tuple[Array, ...]] = {}
    rows = []
    for mode in modes:
        way = (mode.zero, mode.data_axes)
        if way not in found:
            each = np.array([_stored_rate(spec, x, setting, *way, rates) for x in layouts])
            found[way] = tuple(column * np.array(elements) for column in each.T)
        always, once, held = found[way]
        rows.append(mode.second_weight * (always + mode.once_weight * once) + mode.byte_price * held)
    return np.array(rows)


def _stored_rate(
    spec: TensorSpec,
    layout: Layout | None,
    setting: Setting,
    zero: int,
    data_axes: tuple[int, ...],
    rates: ParameterRates,
) -> tuple[float, float, float]:
    """Seconds in all microbatches and once a step, and bytes held, for each local element stored in `layout`."""
    if layout is None:
        return np.inf, 0.0, 0.0
    rate = rates.of(parameter_storage(spec, layout, data_axes, zero), spec)
    return rate.micro_s * setting.num_microbatches, rate.step_s, rate.held_bytes
