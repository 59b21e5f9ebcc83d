"""Fused attention: blocks of query rows in waves over the units, each going once along the keys; or memory.

    block = tile rows × (keys seen + ramp) × (4 head_dim × units / (share × peak) + softmax_ps)

The second term is what a score costs a unit beside its two products (exponential, maximum, sum): it is bound by other
circuits than products are. Blocks fetch their keys and values anew from the cache, `reread` GB/s a unit. Shares of
other head sizes than 128 are between those of the sizes below, as kernels are made for each (arXiv:2205.14135,
arXiv:2407.08608).
"""

from __future__ import annotations

import numpy as np

from autopar.measure.models.beyond import Polynomial, octaves
from autopar.measure.models.form import Array, Constant, Form, Hardware, Limit, Sizes, joined, waves

HEAD_DIMS = (64, 72, 80, 128, 192, 256, 512)
ROWS = 128
"""Query rows of a block."""

BACKWARD = 3.1
"""Backward over forward seconds: 3.0 to 3.3 in cuDNN's published timings, head dim 128."""


def _seconds(constants: Array, sizes: Sizes, hardware: Hardware) -> Array:
    share, softmax, step, launch, memory, ramp, sharpness, reread, *others = map(float, constants)
    queries, keys, width, causal = sizes["seq_q"], sizes["seq_kv"], sizes["head_dim"], sizes["causal"]
    heads = sizes["batch"] * sizes["heads"]
    rows = np.minimum(ROWS, np.maximum(16.0, 2 ** np.ceil(np.log2(queries) - 1e-9)))
    blocks = heads * np.ceil(queries / rows - 1e-9)
    seen = np.where(causal > 0, keys - queries + (queries + rows) / 2, keys)
    by_width = np.log([*others[:3], 1.0, *others[3:]])
    reached = share * np.exp(np.interp(np.log(width), np.log(HEAD_DIMS), by_width))
    score = 4 * width * hardware.units / (reached * hardware.flops_per_s) + softmax * 1e-12
    computing = waves(blocks / hardware.units, step) * rows * (seen + ramp) * score
    once = 2 * width * (heads * queries + sizes["batch"] * sizes["kv_heads"] * keys)
    again = 2 * width * blocks * seen
    moving = hardware.element_bytes * (once / (memory * hardware.bytes_per_s) + again / (reread * 1e9 * hardware.units))
    return launch * hardware.launch_s + joined(computing, moving, sharpness) * sizes["passes"]


def _flops(sizes: Sizes) -> Array:
    scores = sizes["batch"] * sizes["heads"] * sizes["seq_q"] * sizes["seq_kv"] * np.where(sizes["causal"] > 0, 0.5, 1)
    result: Array = 4 * scores * sizes["head_dim"] * sizes["passes"]
    return result


def _rate(constants: Array, hardware: Hardware) -> float:
    reached, softmax, *_ = map(float, constants)
    others = map(float, constants[-len(HEAD_DIMS) + 1 :])
    by_width = dict(zip((d for d in HEAD_DIMS if d != 128), others, strict=True)) | {128: 1.0}
    per_unit = hardware.flops_per_s / hardware.units
    shares = (4 * d / (4 * d / (reached * share) + softmax * 1e-12 * per_unit) for d, share in by_width.items())
    return max(shares) * hardware.flops_per_s


def _features(sizes: Sizes) -> list[Array]:
    length = np.sqrt(sizes["seq_q"] * sizes["seq_kv"])
    return [
        octaves(length, 11, 4),
        octaves(sizes["batch"] * sizes["heads"], 7, 4),
        octaves(sizes["batch"], 4, 4),
        octaves(sizes["heads"] / sizes["kv_heads"], 2, 3),
        octaves(sizes["head_dim"], 7, 1),
        np.where(sizes["causal"] > 0, 1.0, 0.0),
    ]


ATTENTION = Form(
    "attention",
    (
        Constant("share", 0.75, 0.4),
        Constant("softmax_ps", 40.0, 1.0),
        Constant("step", 0.5, 1.5, "share"),
        Constant("launch", 1.5, 0.8),
        Constant("memory", 0.7, 0.5),
        Constant("ramp", 64.0, 1.0),
        Constant("sharpness", 3.0, 0.5),
        Constant("reread", 40.0, 1.0),
        *(Constant(f"head_{d}", 1.0, 0.3) for d in HEAD_DIMS if d != 128),
    ),
    _seconds,
    Polynomial(("length", "samples' heads", "samples", "sharing", "head_dim", "causal"), _features, 3),
    Limit(_flops, _rate),
)
