"""Collectives of one kind on one set of ranks: a curve over bytes, as a ratio to the closed form of the link.

The ratio is straight between knots on logarithmic axes and stays beyond them; each knot's constant is its step from
the one before, so that what was not timed goes on as its neighbours do.
"""

from __future__ import annotations

import numpy as np

from autopar.measure.models.form import Array, Constant, Form, Hardware, Sizes

KNOTS = (12, 14, 16, 18, *range(19, 29), 30)
"""Logarithms of bytes, to base 2: 4 KiB to 1 GiB, close where algorithms switch."""


def _seconds(constants: Array, sizes: Sizes, _: Hardware) -> Array:
    exponent = np.log2(np.maximum(sizes["bytes"], 1.0))
    ratio = np.exp(np.interp(exponent, KNOTS, np.cumsum(constants)))
    result: Array = sizes["closed_s"] * ratio
    return result


COLLECTIVE = Form(
    "collectives",
    (
        Constant("level", 0.0, 2.0, "plain"),
        *(Constant(f"step_{knot}", 0.0, 0.4, "plain") for knot in KNOTS[1:]),
    ),
    _seconds,
)
