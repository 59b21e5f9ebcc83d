"""Matrix products: the best of a few tile shapes, in whole waves over the units; or memory.

    compute = waves × units × tile area × 2 (k + ramp) / (share × tile's share × peak) × (flops / 1e11)^sustained

Tiles are multiples of the hardware's own; large ones compute fastest, small ones waste less of the edges and spread
over more units. `ramp` is the depth whose time goes into filling the pipeline. `sustained` is how clocks fall as
products grow. Products of numbers narrower than two bytes first cast their left side.
"""

from __future__ import annotations

import numpy as np

from autopar.measure.models.beyond import Polynomial, octaves
from autopar.measure.models.form import Array, Constant, Form, Hardware, Limit, Sizes, joined, waves

TILES = ((4, 2, 0), (2, 4, 0), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 3))
"""Sides of the tiles in multiples of the hardware's tile, and which of the shares of the rate they reach."""

LEAST_FLOPS, USUAL_FLOPS, MOST_FLOPS = 1e9, 1e11, 1e15
"""Clocks fall from the first on; `share` is that of products of the second; none is larger than the third."""


def _seconds(constants: Array, sizes: Sizes, hardware: Hardware) -> Array:
    share, ramp, step, launch, memory, middle, small, least, sustained, sharpness, cast = map(float, constants)
    shares = (1.0, middle, small, least)
    m, n, k, batch = sizes["m"], sizes["n"], sizes["k"], sizes["batch"]
    best = np.full(m.shape, np.inf)
    for rows, columns, which in TILES:
        rows, columns = rows * hardware.tile, columns * hardware.tile
        rounds = waves(batch * np.ceil(m / rows) * np.ceil(n / columns) / hardware.units, step)
        best = np.minimum(best, rounds * (rows * columns / shares[which]))
    computing = best * (k + ramp) * (2 * hardware.units / (share * hardware.flops_per_s))
    computing *= np.maximum(2 * m * n * k * batch, LEAST_FLOPS) ** sustained * USUAL_FLOPS**-sustained
    moving = sizes["bytes"] / (memory * hardware.bytes_per_s)
    seconds = launch * hardware.launch_s + joined(computing, moving, sharpness)
    if hardware.element_bytes < 2:
        seconds = seconds + cast * batch * m * k * (2 + hardware.element_bytes) / hardware.bytes_per_s
    return seconds


def _flops(sizes: Sizes) -> Array:
    result: Array = 2 * sizes["m"] * sizes["n"] * sizes["k"] * sizes["batch"]
    return result


def _rate(constants: Array, hardware: Hardware) -> float:
    share, _, _, _, _, middle, small, least, sustained, *_ = map(float, constants)
    clocks = max(float((flops / USUAL_FLOPS) ** -sustained) for flops in (LEAST_FLOPS, MOST_FLOPS))
    return share * max(1.0, middle, small, least) * clocks * hardware.flops_per_s


def _features(sizes: Sizes) -> list[Array]:
    return [*(octaves(sizes[side], 11, 4) for side in ("m", "n", "k")), octaves(sizes["batch"], 0, 4)]


GEMM = Form(
    "gemm",
    (
        Constant("share", 0.75, 0.3),
        Constant("ramp", 100.0, 1.0),
        Constant("step", 0.27, 1.5, "share"),
        Constant("launch", 1.0, 1.0),
        Constant("memory", 0.8, 0.15),
        Constant("middle", 0.95, 0.1),
        Constant("small", 0.8, 0.2),
        Constant("least", 0.6, 0.3),
        Constant("sustained", 0.01, 0.01, "plain"),
        Constant("sharpness", 4.0, 0.3),
        Constant("cast", 0.5, 1.0),
    ),
    _seconds,
    Polynomial(("m", "n", "k", "batch"), _features, 3),
    Limit(_flops, _rate),
)


def gemm_sizes(m: Array, n: Array, k: Array, batch: Array, element_bytes: float) -> Sizes:
    """Sizes of `batch` products (m, k) @ (k, n) whose every number is moved once."""
    moved = batch * (m * k + k * n + m * n) * element_bytes
    return {"m": m, "n": n, "k": k, "batch": batch, "bytes": moved}
