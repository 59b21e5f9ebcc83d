"""Work that bytes limit (pointwise operators, norms, softmax): memory, faster while all fits the cache; or rows.

    moving = bytes / (memory × bandwidth) × (1 − in cache × (1 − 1 / cache)), in cache = 1 / (1 + (bytes / size)²)

Operators that reduce rows also pay `row_us` a row on a unit.
"""

from __future__ import annotations

import numpy as np

from autopar.measure.models.beyond import Polynomial, octaves
from autopar.measure.models.form import Array, Constant, Form, Hardware, Sizes, joined


def _seconds(constants: Array, sizes: Sizes, hardware: Hardware) -> Array:
    launch, memory, cache, size_mib, row_us, sharpness = map(float, constants)
    moved = sizes["bytes"]
    cached = 1 / (1 + (moved / (size_mib * 2**20)) ** 2)
    moving = moved / (memory * hardware.bytes_per_s) * (1 - cached * (1 - 1 / cache))
    turning = sizes["rows"] * (row_us * 1e-6 / hardware.units)
    return launch * hardware.launch_s + joined(moving, turning, sharpness)


def _features(sizes: Sizes) -> list[Array]:
    return [octaves(sizes["bytes"], 24, 6), octaves(np.maximum(sizes["rows"], 1), 12, 6)]


MOVING = Form(
    "elementwise",
    (
        Constant("launch", 1.0, 0.8),
        Constant("memory", 0.8, 0.4),
        Constant("cache", 1.5, 0.5),
        Constant("size_mib", 30.0, 0.7),
        Constant("row_us", 0.05, 1.5),
        Constant("sharpness", 3.0, 0.5),
    ),
    _seconds,
    Polynomial(("bytes", "rows"), _features, 3),
)
