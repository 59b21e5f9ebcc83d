"""Local work of a step's pieces (a block, the embedding, the head) at local shapes, as seconds on one device.

Products and attention are priced by the device's model (`measure/models`); what bytes limit is given as the seconds
that moving them at the datasheet's bandwidth would take, and kernels are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from autopar.cluster import Device
from autopar.dims import Dims
from autopar.measure.models.attention import BACKWARD
from autopar.measure.models.device import DeviceModel
from autopar.measure.models.gemm import GEMM
from autopar.transformer.layout import Layout

SUSTAINED = np.array([constant.name == "sustained" for constant in GEMM.constants])
"""In a step clocks follow the mean power, not that of one product timed by itself: they don't fall as products grow."""


@dataclass(frozen=True)
class Local:
    """Seconds of one pass of one microbatch through a piece, before calibration, and the kernels it starts.

    `gemm` in the compute dtype, `narrow` in a narrower one (float8, float4), `grouped` those of experts in either,
    `attention` fused, `moved` at the whole bandwidth of memory.
    """

    gemm: float = 0.0
    narrow: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: Local) -> Local:
        return Local(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Local:
        return Local(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True)
class Piece:
    """A piece of the model forward and backward; `again` is what of the forward runs once more under `selective`."""

    forward: Local
    backward: Local
    core: Local = Local()


@dataclass(frozen=True)
class _Product:
    m: float
    n: float
    k: float
    batch: float = 1.0


def local_tokens(shape: Dims, layout: Layout) -> float:
    """Tokens of a microbatch on one device."""
    return layout.microbatch * shape.seq / layout.cp


def block_piece(shape: Dims, layout: Layout, model: DeviceModel) -> Piece:
    """A block of the model."""
    tokens, t = local_tokens(shape, layout), layout.tp
    inner, shared = shape.heads * shape.head_dim / t, max(1.0, shape.kv_heads / t) * shape.head_dim
    products = [_Product(tokens, inner + 2 * shared, shape.hidden), _Product(tokens, shape.hidden, inner)]
    fed = _feed_forward(shape, layout, tokens)
    core, fused = _core(shape, layout, model), _fused_experts(shape, layout, model)
    feeding = _grouped if shape.experts and not fused else _linear
    forward, backward = (
        _linear(products, layout, model, backward=turned) + feeding(fed, layout, model, backward=turned)
        for turned in (False, True)
    )
    beside = _beside(shape, layout, tokens, model) * layout.conventions.passes
    kernels = 0.0 if fused else layout.conventions.kernels + (12.0 if shape.experts else 0.0)
    return Piece(
        forward + core.forward + Local(moved=beside, kernels=kernels),
        backward + core.backward + Local(moved=1.6 * beside, kernels=2 * kernels),
        core.forward,
    )


def _fused_experts(shape: Dims, layout: Layout, model: DeviceModel) -> bool:
    """Whether experts run as one product with all beside it, as any other product does."""
    narrow = layout.gemm_dtype != layout.compute and model.device.architecture == "blackwell"
    return bool(shape.experts) and narrow and layout.conventions.fused_experts


def _feed_forward(shape: Dims, layout: Layout, tokens: float) -> list[_Product]:
    """Products of the feed-forward: of a rank's experts, equally loaded, where there are experts."""
    wide = 2 if shape.gated else 1
    if not shape.experts:
        inner = shape.ffn / layout.tp
        return [_Product(tokens, wide * inner, shape.hidden), _Product(tokens, shape.hidden, inner)]
    here = max(1.0, shape.experts / layout.expert_ways)
    split = layout.tp if layout.ep <= 1 else 1  # experts are dealt out whole
    rows = tokens * shape.topk / (1 if split > 1 else layout.tp) / here
    return [
        _Product(tokens, shape.experts, shape.hidden),
        _Product(rows, wide * shape.ffn / split, shape.hidden, here),
        _Product(rows, shape.hidden, shape.ffn / split, here),
    ]


def _linear(products: list[_Product], layout: Layout, model: DeviceModel, *, backward: bool) -> Local:
    """Seconds of linear layers: one product forward, two backward."""
    turned = products
    if backward:
        turned = [_Product(p.m, p.k, p.n, p.batch) for p in products]
        turned += [_Product(p.n, p.k, p.m, p.batch) for p in products]
    seconds = gemm_seconds(turned, layout.gemm_dtype, model)
    return Local(gemm=seconds) if layout.gemm_dtype == layout.compute else Local(narrow=seconds)


def _grouped(products: list[_Product], layout: Layout, model: DeviceModel, *, backward: bool) -> Local:
    """Seconds of the experts' products, whatever their dtype: each by itself, one after the other."""
    alone = (_linear([_Product(p.m, p.n, p.k)], layout, model, backward=backward) * p.batch for p in products)
    return Local(grouped=sum(one.gemm + one.narrow for one in alone))


def gemm_seconds(products: list[_Product], dtype: str, model: DeviceModel) -> float:
    """Seconds of products by the device's model."""
    m, n, k, batch = (
        np.array([getattr(p, name) for p in products], dtype=np.float64) for name in ("m", "n", "k", "batch")
    )
    m, n, k = (np.maximum(np.ceil(x), 1.0) for x in (m, n, k))
    if _is_tf32(dtype, model.device):
        return 2 * gemm_seconds(products, "bfloat16", model)
    width = {"float32": 4.0, "float8_e4m3fn": 1.0, "float4_e2m1fn_x2": 0.5}.get(dtype, 2.0)
    sizes = {"m": m, "n": n, "k": k, "batch": batch, "bytes": batch * (m * k * width + k * n * width + 2 * m * n)}
    priced = _priced_as(dtype, model)
    steady = np.where(SUSTAINED, 0.0, model.known("gemm", priced).values)
    return float(GEMM.seconds(steady, sizes, model.hardware(priced)).sum())


def peak_flops_per_s(dtype: str, device: Device) -> float | None:
    """The datasheet's rate of products of a dtype, as frameworks run them; None where there is none."""
    rates = device.peak_flops_per_s
    return rates["bfloat16"] / 2 if _is_tf32(dtype, device) else rates.get(dtype)


def _is_tf32(dtype: str, device: Device) -> bool:
    """Whether products run as TF32, at half the rate of bfloat16: frameworks do so with float32 where they can."""
    return dtype == "float32" and "bfloat16" in device.peak_flops_per_s


def _priced_as(dtype: str, model: DeviceModel) -> str:
    """Both 16-bit dtypes run at one rate; timings of bfloat16 are those of larger products and newer libraries."""
    both = dtype == "float16" and model.device.peak_flops_per_s.get("bfloat16") == model.device.peak_flops_per_s[dtype]
    return "bfloat16" if both else dtype


def _core(shape: Dims, layout: Layout, model: DeviceModel) -> Piece:
    """The core of attention: one fused kernel, or two batched products with a softmax and dropout between them."""
    heads, rows = shape.heads / layout.tp, shape.seq / layout.cp
    if layout.fused_attention:
        one = np.ones(1)
        sizes = {
            "batch": layout.microbatch * one, "heads": max(1.0, heads) * one,
            "kv_heads": max(1.0, shape.kv_heads / layout.tp) * one, "seq_q": rows * one, "seq_kv": rows * one,
            "head_dim": shape.head_dim * one, "causal": one, "passes": one,
        }  # fmt: skip
        # a rank of a split sequence meets every rank's keys, half of them in all: cp times its own causal square
        seconds = float(model.seconds("attention", sizes, layout.compute)[0]) * layout.cp
        return Piece(Local(attention=seconds), Local(attention=seconds * BACKWARD))
    batch = layout.microbatch * heads
    scores = batch * rows * shape.seq
    product = gemm_seconds([_Product(rows, shape.seq, shape.head_dim, batch)], layout.compute, model)
    valued = gemm_seconds([_Product(rows, shape.head_dim, shape.seq, batch)], layout.compute, model)
    dropped = 1 if layout.conventions.dropout else 0
    bandwidth = model.device.memory_bytes_per_s
    softmax, back = scores * (4 + 5 * dropped) / bandwidth, scores * (6 + 5 * dropped) / bandwidth
    forward = Local(gemm=product + valued, moved=softmax, kernels=4.0)
    return Piece(forward, Local(gemm=2 * (product + valued), moved=back, kernels=7.0), forward)


def _beside(shape: Dims, layout: Layout, tokens: float, model: DeviceModel) -> float:
    """Seconds of norms, residual sums, activations, rotations and transposes of a forward pass, by bytes."""
    t, size = layout.tp, 2.0
    whole = tokens * shape.hidden / (t if layout.sequence else 1)
    inner = tokens * shape.heads * shape.head_dim / t
    shared = tokens * max(1.0, shape.kv_heads / t) * shape.head_dim
    residual = 4 + (7 if layout.conventions.dropout else 6)
    attention = (6 * inner if shape.positions else 4 * (inner + shared)) + 2 * inner
    rows = tokens * (shape.topk / (t if layout.ep > 1 else 1) if shape.experts else 1)
    width = shape.ffn / (t if not shape.experts or layout.ep <= 1 else 1)
    active = 0.0 if _fused_experts(shape, layout, model) else rows * width * (3 if shape.gated else 2)
    routed = 6 * rows * shape.hidden if shape.experts else 0.0  # permuted, sent, put back
    casts = 1.5 * (whole + active / 2) if layout.gemm_dtype != layout.compute else 0.0
    return size * (residual * whole + attention + active + routed + casts) / model.device.memory_bytes_per_s


def embedding_piece(shape: Dims, layout: Layout, model: DeviceModel) -> Piece:
    """The token embedding: rows gathered forward, added up backward."""
    moved = local_tokens(shape, layout) * shape.hidden * 2.0 / model.device.memory_bytes_per_s
    extra = 5 if layout.conventions.dropout else 2
    return Piece(Local(moved=moved * extra, kernels=4.0), Local(moved=moved * (extra + 2), kernels=6.0))


def head_piece(shape: Dims, layout: Layout, model: DeviceModel) -> Piece:
    """The last norm, the projection to the vocabulary and cross-entropy."""
    tokens = local_tokens(shape, layout)
    product = [_Product(tokens, shape.vocab / layout.tp, shape.hidden)]
    plain = gemm_seconds(product, layout.compute, model)
    p = product[0]
    back = gemm_seconds([_Product(p.m, p.k, p.n), _Product(p.n, p.k, p.m)], layout.compute, model)
    logits = tokens * shape.vocab / layout.tp / model.device.memory_bytes_per_s
    wide = 6.0 if layout.conventions.lean_loss else 18.0  # written, widened, its maximum, exponentials and sum
    return Piece(
        Local(gemm=plain, moved=wide * logits, kernels=12.0), Local(gemm=back, moved=10.0 * logits, kernels=12.0)
    )
