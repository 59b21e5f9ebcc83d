"""Prices on the labels of a layer: the numbers that elimination minimises.

For a mode (ZeRO level over some data axes, recomputation or not, a price per byte held) the cost of a labelling is

    microbatches * (forward + backward + what runs again) + parameter synchronisation + optimizer + price * bytes

The bytes counted are parameters, states and gradients exactly, and each saved activation once: with the price as a
Lagrange multiplier the minimum is a lower bound on any plan under a byte limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.layers.call_prices import CallPrices
from autopar.formulate.layers.kept import kept_bytes
from autopar.formulate.layers.labels import Edge, LabelSpace, Placed, at_cut, dealt_layouts
from autopar.formulate.layers.relayout_prices import RelayoutPrices
from autopar.formulate.layers.runs import Surroundings
from autopar.graph import LayerClass, Op
from autopar.plan import MeshAxis
from autopar.shard.put_off import most_put_off
from autopar.shard.regions import rerun_regions
from autopar.shard.saved import last_saver, saves_its_own

Array = NDArray[np.float64]

Pair: TypeAlias = tuple[int, int]

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
    recompute: str
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

    `groups`: of devices among which stages are dealt. With several gradients are whole, whatever ZeRO, until the step
    ends.
    """

    mesh: tuple[MeshAxis, ...]
    batch: int
    num_microbatches: int
    groups: int = 1

    @property
    def staged(self) -> bool:
        """Whether layers are in one stage of several."""
        return self.groups > 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(axis.size for axis in self.mesh)


@dataclass
class Seconds:
    """Seconds of one microbatch on the labels of a space, by variable and by pair of variables."""

    single: list[Array]
    pair: dict[tuple[int, int], Array] = field(default_factory=dict)

    def add_pair(self, source: int, target: int, seconds: Array) -> None:
        """Add seconds that two variables decide, or, if they are one, its labels."""
        if source == target:
            self.single[source] += np.diagonal(seconds)
        else:
            self.pair[source, target] = self.pair.get((source, target), 0.0) + seconds


class Least(NamedTuple):
    """Seconds of a microbatch that a layer takes at least, of both passes and of each alone; `inputs_s` of the backward
    pass without what makes gradients of weights and can be put off."""

    both_s: float
    forward_s: float
    backward_s: float
    inputs_s: float


@dataclass
class SpaceCosts:
    """Seconds and bytes of one microbatch on the labels of a space.

    By kind of recomputation `rerun`: of what runs again in the backward, 0 where a label is illegal; `kept_bytes`: of
    what is kept for it. `chosen`: of pairs, by what of them was asked for.
    """

    space: LabelSpace
    forward: Seconds
    backward: Seconds
    rerun: dict[str, Seconds]
    kept_bytes: dict[str, list[Array]]
    chosen: dict[object, Array] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of recomputation, in the order of the arrays by kind."""
        return tuple(self.rerun)

    @cached_property
    def single(self) -> list[Array]:
        """For each variable all seconds of a microbatch (kinds, labels)."""
        both = [f + b for f, b in zip(self.forward.single, self.backward.single, strict=True)]
        return [np.stack([x + self.rerun[kind].single[v] for kind in self.kinds]) for v, x in enumerate(both)]

    @cached_property
    def pair(self) -> dict[tuple[int, int], Array]:
        """For each pair of variables all seconds of a microbatch (kinds, labels, labels)."""
        return {
            key: np.stack([f + self.backward.pair[key] + self.rerun[kind].pair.get(key, 0.0) for kind in self.kinds])
            for key, f in self.forward.pair.items()
        }

    @cached_property
    def kept(self) -> list[Array]:
        """For each variable the bytes kept for the backward (kinds, labels)."""
        return [np.stack([self.kept_bytes[k][v] for k in self.kinds]) for v in range(len(self.space.variables))]

    @cached_property
    def in_line(self) -> tuple[Array, Array]:
        """Seconds and kept bytes of all variables one after the other (kinds, all labels)."""
        return np.concatenate(self.single, axis=1), np.concatenate(self.kept, axis=1)

    def nowhere_dearer(self, second_weight: float, byte_price: float) -> NDArray[np.bool_]:
        """[j, k]: whether kind j costs no more than kind k on any labels, with seconds and kept bytes counted so.

        The sum of what each variable and each pair of them saves at least must not be negative.
        """
        seconds, kept = self.in_line
        starts = np.cumsum([0, *map(len, self.space.variables)])[:-1]
        each = np.minimum.reduceat(_by_kinds(second_weight * seconds + byte_price * kept), starts, axis=2)
        found: NDArray[np.bool_] = each.sum(axis=2) + second_weight * self._saved_by_pairs >= 0
        return found

    @cached_property
    def _saved_by_pairs(self) -> Array:
        """[j, k]: what kind j saves at least of the seconds of kind k's pairs."""
        each = [_by_kinds(table.reshape(len(self.kinds), -1)).min(axis=2) for table in self.pair.values()]
        return np.sum(each, axis=0) if each else np.zeros((len(self.kinds),) * 2)


def space_costs(
    space: LabelSpace,
    surroundings: Sequence[Surroundings],
    setting: Setting,
    calls: CallPrices,
    relayouts: RelayoutPrices,
) -> SpaceCosts:
    """Price every label and every pair of labels of a layer at the setting's microbatch.

    `surroundings` are those of layers that differ in what they keep alone: the bytes are the least of any.
    """
    kinds = surroundings[0].pins.recompute
    again = {kind: _Again(space.layer, kind) for kind in kinds}
    forward, backward = (Seconds([np.zeros(len(v)) for v in space.variables]) for _ in range(2))
    rerun = {kind: Seconds([np.zeros(len(v)) for v in space.variables]) for kind in kinds}
    for placed, (ahead,), (behind,) in calls.of(space, [setting.batch], setting.mesh):
        forward.single[placed.variable] += ahead
        backward.single[placed.variable] += behind
        for kind in kinds:
            if placed.op.name in again[kind].ops:
                rerun[kind].single[placed.variable] += _finite(ahead)
    for v, spec in ((space.entry, surroundings[0].entry), (space.exit, surroundings[0].leave)):
        barred = [x is None for x in dealt_layouts(spec, space.variables[v].layouts, space.sizes, setting.batch)]
        forward.single[v][barred] = np.inf
    changes = [
        (
            space.layer.values[edge.value],
            space.dealt(edge.value, edge.source, setting.batch),
            space.dealt(edge.value, edge.target, setting.batch),
        )
        for edge in space.edges
    ]
    relayouts.learn(changes, setting.batch)
    for edge, (spec, sources, targets) in zip(space.edges, changes, strict=True):
        ends = edge.source.variable, edge.target.variable
        ahead, behind = relayouts.table(spec, sources, targets, setting.batch)
        forward.add_pair(*ends, ahead)
        backward.add_pair(*ends, behind)
        for kind in kinds:
            if again[kind].includes(edge):
                rerun[kind].add_pair(*ends, _finite(ahead))
    kept = kept_bytes(space, surroundings, setting.batch, kinds)
    return SpaceCosts(space, forward, backward, rerun, kept)


def _by_kinds(costs: Array) -> Array:
    """[j, k]: by how much kind j costs less than kind k, inf where both are illegal; `costs` (kinds, ...)."""
    with np.errstate(invalid="ignore"):
        less = costs[None] - costs[:, None]
    return np.where(np.isnan(less), np.inf, less)


def least_of(space: LabelSpace, calls: Iterable[tuple[Placed, Array, Array]], batches: int) -> list[Least]:
    """For each of so many batches what a layer's passes take at least by its calls alone (`CallPrices.of`), each
    variable as suits the pass best."""
    both, forward, backward, inputs = ([np.zeros((batches, len(v))) for v in space.variables] for _ in Least._fields)
    for placed, ahead, behind in calls:
        v = placed.variable
        both[v] += ahead + behind
        forward[v] += ahead
        backward[v] += behind
        # No share is 0: what is illegal costs inf, and 0 times inf is no number.
        inputs[v] += behind * max(1.0 - most_put_off(placed.op, space.layer), np.finfo(float).tiny)
    each = [sum(own.min(axis=1) for own in of).tolist() for of in (both, forward, backward, inputs)]
    return [Least(*of) for of in zip(*each, strict=True)]


def _finite(seconds: Array) -> Array:
    return np.where(np.isinf(seconds), 0.0, seconds)


class _Again:
    """What of a layer runs again under a kind of recomputation, as `run_again` says of its lowered programs."""

    def __init__(self, layer: LayerClass, kind: str) -> None:
        self._layer, self._light = layer, kind == "light"
        self._ends: list[tuple[frozenset[str], int]] = []
        ops: list[Op] = []
        for region in rerun_regions(layer, kind):
            if self._light:
                self._ends.append((region, len(layer.ops)))
                ops += [op for op in layer.ops if op.name in region]
                continue
            end = last_saver([op if op.name in region else None for op in layer.ops])
            self._ends.append((region, end))
            ops += [op for op in layer.ops[: end + 1] if op.name in region]
            ops = ops[: len(ops) - (end >= 0 and not saves_its_own(layer.ops[end]))]
        self.ops = frozenset(op.name for op in ops)

    def includes(self, edge: Edge) -> bool:
        """Whether a change of layout is made again."""
        return any(edge.place <= end and self._inside(edge, region) for region, end in self._ends)

    def _inside(self, edge: Edge, region: frozenset[str]) -> bool:
        if len(region) == len(self._layer.ops):
            return True
        maker = self._layer.producer.get(edge.value)
        return maker is not None and maker.name in region and (self._light or not region.isdisjoint(edge.readers))


def passing_seconds(space: LabelSpace, around: Surroundings, setting: Setting, relayouts: RelayoutPrices) -> Array:
    """Seconds of relaying the values that pass the layer by, for each pair of states, shape (entry, exit)."""
    before, behind = space.variables[space.entry].layouts, space.variables[space.exit].layouts
    total = np.zeros((len(before), len(behind)))
    for value in around.passing:
        sources = at_cut(value.spec, around.entry, before, value.main_in_front)
        targets = at_cut(value.spec, around.leave, behind, value.main_behind)
        total += sum(relayouts.table(value.spec, sources, targets, setting.batch))
    return total
