"""What keeping a layer's parameters costs in each mode, and the modes that this makes worth having."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from autopar.engine.label_graph import Labels
from autopar.formulate.layers.labels import LabelSpace
from autopar.formulate.layers.rates import ParameterRates
from autopar.formulate.layers.runs import Surroundings
from autopar.formulate.layers.tables import Array, Mode, Setting
from autopar.graph import LayerClass, Layout, TensorSpec, local_shape
from autopar.plan import data_axes_of
from autopar.shard.gathering import may_spare_parameters
from autopar.shard.storage import parameter_storage


def storage_costs(
    space: LabelSpace, around: Surroundings, setting: Setting, modes: Sequence[Mode], rates: ParameterRates
) -> list[tuple[int, Array]]:
    """Variables with seconds (and price times bytes) that ZeRO decides on their labels, each (modes, labels).

    At the entry inf where the mode's data axes are not those of the state, then each parameter that the layer owns.
    """
    ways = list(dict.fromkeys((mode.zero, mode.data_axes) for mode in modes))
    way = [ways.index((mode.zero, mode.data_axes)) for mode in modes]
    axes = [data_axes_of(state, around.entry.batch_dim) for state in space.variables[space.entry].layouts]
    barred = np.array([[np.inf if zero and found != wanted else 0.0 for found in axes] for zero, wanted in ways])
    weights = np.array([[m.second_weight, m.second_weight * m.once_weight, m.byte_price] for m in modes])
    found = [(space.entry, barred[way])]
    for stored in space.stored:
        if around.owned[space.layer.params.index(stored.param)]:
            spec, layouts = space.layer.values[stored.param], stored.home.layouts
            elements = _elements(spec, layouts, setting.sizes)
            again = gathered_again(space.layer, around, stored.param, setting.staged)
            each = np.array([rates.table(spec, layouts, *w, again) for w in ways])
            each[:, 0] *= setting.num_microbatches
            found.append((stored.home.variable, (weights[:, :, None] * each[way]).sum(axis=1) * elements))
    return found


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
    modes: Sequence[Mode], costs: Sequence[tuple[int, Array]], tied: bool, entries: Labels | None = None
) -> list[int]:
    """Numbers of the modes without those that are nowhere cheaper than another one of the same price.

    `costs` are those of `storage_costs`, of which the entry's count at `entries` alone, if given. Layers that share
    parameters (`tied`) have one ZeRO level: their modes are compared with those of the same level alone.
    """
    (_, barred), *rest = costs
    barred = barred if entries is None else barred[:, entries]
    table = np.concatenate([barred, *(kept for _, kept in rest)], axis=1)
    groups: dict[object, list[int]] = {}
    for k, mode in enumerate(modes):
        groups.setdefault((mode.price, mode.zero if tied else None), []).append(k)
    kept: list[int] = []
    for group in groups.values():
        again = np.array([modes[k].recompute for k in group])
        gainless = (again == "none")[:, None] & (
            modes[group[0]].byte_price == 0.0
        )  # bytes that cost nothing needn't be saved
        comparable = (again[:, None] == again[None]) | gainless
        beats = comparable & (table[group][:, None] <= table[group][None]).all(axis=2)
        beats &= ~beats.T | np.tri(len(group), k=-1, dtype=bool).T  # of equal ones the first stays
        kept += [group[i] for i in np.flatnonzero(~beats.any(axis=0))]
    return sorted(kept)


def held_bytes(
    space: LabelSpace, around: Surroundings, setting: Setting, rates: ParameterRates, mode: Mode, labels: Labels
) -> float:
    """Bytes of parameters, states and gradients that count for one layer on the labels (V,) of its variables."""
    entry = space.variables[space.entry].layouts[labels[space.entry]]
    axes = data_axes_of(entry, around.entry.batch_dim) if mode.zero else ()
    total = 0.0
    for stored in space.stored:
        if around.owned[space.layer.params.index(stored.param)]:
            spec, layout = space.layer.values[stored.param], stored.home.layouts[labels[stored.home.variable]]
            if layout is not None:
                rate = rates.of(parameter_storage(spec, layout, axes, mode.zero), spec)
                total += rate.held_bytes * prod(local_shape(spec, 1, layout, setting.sizes))
    return total
