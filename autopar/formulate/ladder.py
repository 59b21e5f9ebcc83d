"""Prices of bytes at which tables are made, and the modes of a layer that go with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isinf

import numpy as np

from autopar.formulate.labels import LabelSpace
from autopar.formulate.runs import Surroundings
from autopar.formulate.tables import Mode, Price
from autopar.plan import data_axes_of

PRICE_LADDER = (0.02, 0.1, 0.4, 1.5, 6.0)
"""Prices of all the memory there is, as multiples of the time of computation alone."""
FINE_PRICES = 5
"""Prices tried between the neighbours of the best of the ladder."""
ONLY_BYTES, NO_TIME = 1.0, 1e-15
"""Price of a byte and weight of a second at which the cheapest chain is the one that holds least."""


def coarse_ladder(floor_s: float, whole_bytes: int | None) -> list[float]:
    """0, and prices at which `whole_bytes` of memory cost some multiple of `floor_s`.

    There are no others without a limit, or where nothing is legal.
    """
    if whole_bytes is None or isinf(floor_s):
        return [0.0]
    return [0.0, *(x * (floor_s / whole_bytes) for x in PRICE_LADDER)]


def fine_ladder(coarse: Sequence[float], best: int) -> list[float]:
    """0, and prices between the neighbours of the best one."""
    if best == 0:
        return [0.0, coarse[1] / 4, coarse[1]]
    low = coarse[best - 1] if best != 1 else coarse[1] * coarse[1] / coarse[2]
    high = coarse[min(best + 1, len(coarse) - 1)]
    return [0.0, *np.geomspace(low, high, FINE_PRICES).tolist()]


def modes_of(around: Surroundings, space: LabelSpace, prices: Sequence[Price]) -> Iterator[Mode]:
    """Every mode of a layer at the prices: ZeRO levels and axes, kinds of recomputation."""
    batch_dim = around.entry.batch_dim
    found = {data_axes_of(state, batch_dim) for state in space.variables[space.entry].layouts}
    for price, count, once in prices:
        for recompute in around.pins.recompute:
            for zero in around.pins.zero:
                for axes in sorted(found - {()}) if zero else [()]:
                    weight = NO_TIME if price == ONLY_BYTES else 1.0
                    yield Mode(zero, axes, recompute, price, weight, count, once)
