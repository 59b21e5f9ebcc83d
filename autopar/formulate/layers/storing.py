"""What keeping a layer's parameters costs in each mode, and the modes that this makes worth having."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.engine.label_graph import Labels
from autopar.formulate.layers.labels import LabelSpace
from autopar.formulate.layers.rates import ParameterRates
from autopar.formulate.layers.runs import Surroundings
from autopar.formulate.layers.tables import Array, Mode, Setting, SpaceCosts
from autopar.graph import LayerClass, Layout, TensorSpec, local_shape
from autopar.shard.gathering import may_spare_parameters
from autopar.shard.storage import Axes, parameter_storage


def storage_costs(
    space: LabelSpace, around: Surroundings, setting: Setting, modes: Sequence[Mode], rates: ParameterRates
) -> list[tuple[int, Array]]:
    """Variables with seconds (and price times bytes) that ZeRO decides on their labels, each (modes, labels).

    At the entry inf where the mode's data axes are not those of the state, then each parameter that the layer owns.
    """
    ways = tuple(dict.fromkeys((mode.zero, mode.data_axes) for mode in modes))
    key = space, around, ways, setting.staged
    if key not in rates.known:
        rates.known[key] = _Kept.of(*key, rates)
    kept = rates.known[key]
    way = [ways.index((mode.zero, mode.data_axes)) for mode in modes]
    found = [(space.entry, kept.barred[way])]
    if kept.variables:
        times, line = setting.num_microbatches, kept.line[:, way]
        micro, step, price = np.array(
            [[[m.second_weight * times], [m.second_weight * m.once_weight], [m.byte_price]] for m in modes]
        ).transpose(1, 0, 2)
        ends = np.cumsum([len(space.variables[v]) for v in kept.variables])[:-1]
        each = np.split(micro * line[0] + step * line[1] + price * line[2], ends, axis=1)
        found += zip(kept.variables, each, strict=True)
    return found


class _Kept(NamedTuple):
    """What keeping parameters costs in some ways (ZeRO level, its axes): those of `variables` in a line.

    `barred` (ways, entry labels): inf where the axes are not the state's. `line` (3, ways, all labels): seconds in each
    microbatch and once a step, and bytes.
    """

    barred: Array
    variables: tuple[int, ...]
    line: Array

    @classmethod
    def of(
        cls,
        space: LabelSpace,
        around: Surroundings,
        ways: Sequence[tuple[int, Axes]],
        staged: bool,
        rates: ParameterRates,
    ) -> _Kept:
        axes = [around.zero_axes(state) for state in space.variables[space.entry].layouts]
        barred = np.array([[np.inf if zero and found != wanted else 0.0 for found in axes] for zero, wanted in ways])
        owned = dict(zip(space.layer.params, around.owned, strict=True))
        stored = [one for one in space.stored if owned[one.param]]
        lines = []
        for one in stored:
            spec, layouts = space.layer.values[one.param], one.home.layouts
            again = gathered_again(space.layer, around, one.param, staged)
            each = np.stack([rates.table(spec, layouts, *way, again) for way in ways], axis=1)
            lines.append(each * _elements(spec, layouts, space.sizes))
        line = np.concatenate(lines, axis=2) if lines else np.zeros((3, len(ways), 0))
        return cls(barred, tuple(one.home.variable for one in stored), line)


def gathered_again(layer: LayerClass, around: Surroundings, param: str, staged: bool) -> bool:
    """Whether ZeRO 3 gathers a parameter for the backward pass, too, under every strategy.

    It spares those that the backward pass doesn't read and, but in a pipeline (`staged`), the last layer's and those
    that layers share.
    """
    once = not staged and (around.last or param in around.tied)
    return not (once or may_spare_parameters(layer))


@lru_cache(maxsize=1 << 14)
def _elements(spec: TensorSpec, layouts: tuple[Layout | None, ...], sizes: tuple[int, ...]) -> Array:
    """(layouts,): elements of one rank's shard in each layout."""
    return np.array([1 if x is None else prod(local_shape(spec, 1, x, sizes)) for x in layouts], dtype=np.float64)


def undominated(
    modes: Sequence[Mode],
    stored: Sequence[tuple[int, Array]],
    costs: SpaceCosts,
    num_microbatches: int,
    entries: Labels,
) -> list[int]:
    """Numbers of the modes without those that are nowhere cheaper than another one of the same price.

    `stored` are `storage_costs`, of which the entry's count at `entries` alone; `costs` those of a microbatch. Layers
    that share parameters have one ZeRO level: their modes are compared with those of the same level alone.
    """
    (_, barred), *rest = stored
    barred, tied = barred[:, entries], bool(costs.space.tied)
    table = np.concatenate([barred, *(kept for _, kept in rest)], axis=1)
    groups: dict[object, list[int]] = {}
    for k, mode in enumerate(modes):
        groups.setdefault((mode.price, mode.zero if tied else None), []).append(k)
    kept: list[int] = []
    for group in groups.values():
        mode, kinds = modes[group[0]], [costs.kinds.index(modes[k].recompute) for k in group]
        weights = num_microbatches * max(mode.second_weight, np.finfo(float).tiny), mode.byte_price * mode.in_flight
        comparable = costs.nowhere_dearer(*weights)[np.ix_(kinds, kinds)]
        beats = comparable & (table[group][:, None] <= table[group][None]).all(axis=2)
        beats &= ~beats.T | np.tri(len(group), k=-1, dtype=bool).T  # of equal ones the first stays
        kept += [group[i] for i in np.flatnonzero(~beats.any(axis=0))]
    return sorted(kept)


def held_bytes(
    space: LabelSpace, around: Surroundings, setting: Setting, rates: ParameterRates, mode: Mode, labels: Labels
) -> float:
    """Bytes of parameters, states and gradients that count for one layer on the labels (V,) of its variables."""
    entry = space.variables[space.entry].layouts[labels[space.entry]]
    axes = around.zero_axes(entry) if mode.zero else ()
    total = 0.0
    for stored in space.stored:
        if around.owned[space.layer.params.index(stored.param)]:
            spec, layout = space.layer.values[stored.param], stored.home.layouts[labels[stored.home.variable]]
            if layout is not None:
                rate = rates.of(parameter_storage(spec, layout, axes, mode.zero), spec)
                total += rate.held_bytes * prod(local_shape(spec, 1, layout, setting.sizes))
    return total
