"""Prices of bytes at which tables are made, and the modes of a layer that go with them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.formulate.layers.runs import Surroundings
from autopar.formulate.layers.tables import Mode, Price

ONLY_BYTES, NO_TIME = 1.0, 1e-15
"""Price of a byte and weight of a second at which the cheapest chain is the one that holds least."""


def modes_of(around: Surroundings, prices: Sequence[Price]) -> list[Mode]:
    """Every mode of a layer at the prices, its data axes left open: ZeRO levels, kinds of recomputation."""
    return [
        Mode(zero, (), recompute, price, NO_TIME if price == ONLY_BYTES else 1.0, count, once)
        for price, count, once in prices
        for recompute in around.pins.recompute
        for zero in around.pins.zero
    ]
