"""What keeping a layer's parameters costs in each mode, and the modes that this makes worth having."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from autopar.formulate.labels import LabelSpace
from autopar.formulate.rates import ParameterRates
from autopar.formulate.runs import Surroundings
from autopar.formulate.tables import Array, Mode, Setting
from autopar.graph import local_shape
from autopar.plan import data_axes_of


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
            elements = [1 if x is None else prod(local_shape(spec, 1, x, setting.sizes)) for x in layouts]
            each = np.array([rates.table(spec, layouts, *w) for w in ways])
            each[:, 0] *= setting.num_microbatches
            found.append((stored.home.variable, (weights[:, :, None] * each[way]).sum(axis=1) * elements))
    return found


def undominated(
    space: LabelSpace, around: Surroundings, setting: Setting, modes: Sequence[Mode], rates: ParameterRates
) -> list[Mode]:
    """Modes without those that are nowhere cheaper than another one of the same price.

    Layers that share parameters have one ZeRO level: their modes are compared with those of the same level alone.
    """
    costs = np.concatenate([kept for _, kept in storage_costs(space, around, setting, modes, rates)], axis=1)
    groups: dict[object, list[int]] = {}
    for k, mode in enumerate(modes):
        groups.setdefault((mode.price, mode.zero if space.tied else None), []).append(k)
    kept: list[int] = []
    for group in groups.values():
        again = np.array([modes[k].recompute for k in group])
        gainless = (again == "none")[:, None] & (
            modes[group[0]].byte_price == 0.0
        )  # bytes that cost nothing needn't be saved
        comparable = (again[:, None] == again[None]) | gainless
        beats = comparable & (costs[group][:, None] <= costs[group][None]).all(axis=2)
        beats &= ~beats.T | np.tri(len(group), k=-1, dtype=bool).T  # of equal ones the first stays
        kept += [group[i] for i in np.flatnonzero(~beats.any(axis=0))]
    return [modes[k] for k in sorted(kept)]
