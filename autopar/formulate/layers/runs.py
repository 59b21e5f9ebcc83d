"""Runs of equal layers: what the search sees of a model, however deep it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TypedDict

from autopar.cost.activations import outputs_saved
from autopar.formulate.layers.recompute import offered
from autopar.formulate.layers.states import cut_layouts
from autopar.formulate.pins import Pins
from autopar.graph import LayerClass, Layout, OpGraph, TensorSpec
from autopar.plan import data_axes_of


@dataclass(frozen=True)
class Passing:
    """A value that passes a layer by; it may be the main one of the cut in front or behind."""

    spec: TensorSpec
    main_in_front: bool
    main_behind: bool


@dataclass(frozen=True)
class Surroundings:
    """A layer class where it stands: equal surroundings mean equal choices and equal costs.

    `entry`, `leave`: main values of the cuts in front and behind, `main_input`, `main_output` their names in the
    class ('' where it does not read or make them). `passing`: specs of values that only pass by.
    `owned`: for each parameter, whether this is the first layer that uses it (only there it counts); `graded`: whether
    it is the last (only there its gradient counts: that is where it is made first).
    `tied`: class parameters that other layers use, too; `tied_split`: whether their storage may be split (only if the
    model has one such parameter). `pins`, `next_pins`: limits on this layer and on the next. `held`: inputs that an
    earlier layer keeps for its backward, so that they cost nothing here. `promised`: positions, among inputs and then
    outputs, of what later layers so count on.
    """

    class_index: int
    entry: TensorSpec
    leave: TensorSpec
    main_input: str
    main_output: str
    first: bool
    last: bool
    passing: tuple[Passing, ...]
    owned: tuple[bool, ...]
    tied: tuple[str, ...]
    tied_split: bool
    pins: Pins
    next_pins: Pins
    held: frozenset[str] = frozenset()
    promised: frozenset[int] = frozenset()
    graded: tuple[bool, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def zero_axes(self, state: Layout) -> tuple[int, ...]:
        """Axes over which ZeRO shards where the layer is entered in `state`: those that split the batch, as far as pins
        allow them."""
        axes, allowed = data_axes_of(state, self.entry.batch_dim), self.pins.zero_axes
        return axes if allowed is None else tuple(a for a in axes if a in allowed)

    def states(self, sizes: tuple[int, ...], batch: int) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Possible layouts of the main values in front and behind."""
        before = cut_layouts(self.entry, sizes, batch, inner=not self.first)
        behind = cut_layouts(self.leave, sizes, batch, inner=not self.last)
        entry = tuple(x for x in before if self.pins.allows_state(self.entry, x))
        if self.last:
            return entry, behind
        return entry, tuple(x for x in behind if self.next_pins.allows_state(self.leave, x))


@lru_cache(maxsize=1 << 12)
def alike(around: Surroundings) -> Surroundings:
    """What stands for all surroundings that differ in what layers keep for others alone: they have one table."""
    return replace(around, held=frozenset(), promised=frozenset(), graded=())


@dataclass(frozen=True)
class LayerRun:
    """`count` equal consecutive layers from `first_layer` on.

    `unread`: positions of outputs that no later layer reads and that aren't the loss, so that no gradient comes back
    for them. `model_elements`: of all trained parameters of the model. `inputs`: of the model, in its first run.
    `elements_before`: of trained parameters of the layer in front of the first one.
    """

    first_layer: int
    count: int
    around: Surroundings
    unread: frozenset[int]
    layer: LayerClass = field(repr=False)
    model_elements: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    elements_before: int = 0


def layer_runs(graph: OpGraph, pins: Sequence[Pins], staged: bool = False) -> tuple[LayerRun, ...]:
    """The model as runs of layers with equal surroundings; `pins[i]` limits layer i.

    `staged`: layers may be in several stages, so that each owns all parameters it uses.
    """
    uses = Counter(name for layer in graph.layers for name in dict.fromkeys(layer.params))
    several = frozenset(name for name, count in uses.items() if count > 1)
    last_use = {name: index for index, layer in enumerate(graph.layers) for name in layer.params}
    inputs = tuple(graph.values[name] for name in graph.inputs)
    holdings = _holdings(graph)
    seen: set[str] = set()
    read = {name for layer in graph.layers for name in layer.inputs} | {graph.loss}
    elements = sum(prod(spec.shape_at(1)) for spec in graph.params.values() if spec.requires_grad)
    runs: list[LayerRun] = []
    for index, layer in enumerate(graph.layers):
        graded = tuple(staged or last_use[name] == index for name in layer.params)
        around = replace(_surroundings(graph, index, pins, several, seen), graded=graded, **holdings[index])
        kinds = offered(graph.classes[layer.class_index], around.pins.recompute)
        around = replace(around, pins=replace(around.pins, recompute=kinds))
        unread = frozenset(i for i, name in enumerate(layer.outputs) if name not in read)
        first, count = index, 1
        if runs and (runs[-1].around, runs[-1].unread) == (around, unread):
            last = runs.pop()
            first, count = last.first_layer, last.count + 1
        own = graph.classes[layer.class_index]
        before = trained_elements(graph.classes[graph.layers[first - 1].class_index]) if first else 0
        runs.append(LayerRun(first, count, around, unread, own, elements, () if first else inputs, before))
        seen.update(() if staged else layer.params)
    return tuple(runs)


def trained_elements(layer: LayerClass) -> int:
    """Elements of the parameters of a layer that are trained."""
    return sum(prod(layer.values[n].shape_at(1)) for n in layer.params if layer.values[n].requires_grad)


class _Holdings(TypedDict):
    held: frozenset[str]
    promised: frozenset[int]


def _holdings(graph: OpGraph) -> list[_Holdings]:
    """For each layer, what an earlier one keeps for it and what it keeps for later ones.

    Inputs of the model are kept by whoever gives them. Else who keeps a value is who makes it or reads it first of
    those with an op that saves it. That layer pays for it whether it is recomputed or not: so the bytes of a layer
    don't depend on how its neighbours are run.
    """
    saved = [outputs_saved(c) for c in graph.classes]
    last_read = {name: index for index, layer in enumerate(graph.layers) for name in layer.inputs}
    kept = set(graph.inputs)
    found: list[_Holdings] = []
    for index, layer in enumerate(graph.layers):
        own = graph.classes[layer.class_index]
        held = frozenset(mine for name, mine in zip(layer.inputs, own.inputs, strict=True) if name in kept)
        ends = zip((*layer.inputs, *layer.outputs), (*own.inputs, *own.outputs), strict=True)
        keeps = [name if mine in saved[layer.class_index] else "" for name, mine in ends]
        promised = frozenset(i for i, name in enumerate(keeps) if last_read.get(name, -1) > index)
        found.append(_Holdings(held=held, promised=promised))
        kept.update(keeps)
    return found


def _possible(pins: Pins, entry: TensorSpec) -> Pins:
    """`pins` of a layer that is entered by `entry`: where that has no samples, ZeRO has no axes to shard over."""
    return pins if entry.batch_dim is not None or 0 in pins.zero else replace(pins, zero=(0,))


def _surroundings(
    graph: OpGraph, index: int, pins: Sequence[Pins], several: frozenset[str], seen: set[str]
) -> Surroundings:
    """Where layer `index` stands; `several` are the parameters that more than one layer reads."""
    layer, last = graph.layers[index], index == len(graph.layers) - 1
    layer_class = graph.classes[layer.class_index]
    front, behind = graph.cuts[index], graph.cuts[index + 1]
    passing = [name for name in behind.values if name in front.values and name not in layer.outputs]
    inputs = dict(zip(layer.inputs, layer_class.inputs, strict=True))
    outputs = dict(zip(layer.outputs, layer_class.outputs, strict=True))
    tied = [local for local, name in zip(layer_class.params, layer.params, strict=True) if name in several]
    return Surroundings(
        class_index=layer.class_index,
        entry=graph.values[front.main],
        leave=graph.values[behind.main],
        main_input=inputs.get(front.main, ""),
        main_output=outputs.get(behind.main, inputs.get(behind.main, "")),
        first=index == 0,
        last=last,
        passing=tuple(Passing(graph.values[n], n == front.main, n == behind.main) for n in passing),
        owned=tuple(name not in seen for name in layer.params),
        tied=tuple(tied),
        tied_split=len(several) == 1,
        pins=_possible(pins[index], graph.values[front.main]),
        next_pins=pins[min(index + 1, len(pins) - 1)],
    )
