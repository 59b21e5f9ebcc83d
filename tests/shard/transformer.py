"""A small transformer layer with loss as a LayerClass, written by hand: every kind of call in a few ops."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.graph import BROADCAST, REPLICATE, Extent, LayerClass, Layout, TensorSpec
from autopar.plan import LayerStrategy
from autopar.shard.rules import assignments, rule_for
from tests.shard.interpreter import make_op as op

B = Extent(1)


class Dims(NamedTuple):
    """Lengths of the dims of the layer; heads are 4 wide."""

    seq: int = 4
    heads: int = 4
    vocab: int = 16
    inner: int = 32


EVEN, UNEVEN = Dims(), Dims(5, 6, 19, 30)


def spec(*shape: Extent | int, dtype: str = "float64", grad: bool = True) -> TensorSpec:
    """Spec of a tensor from lengths."""
    return TensorSpec(tuple(e if isinstance(e, Extent) else Extent(0, e) for e in shape), dtype, grad)


def transformer(dims: Dims = EVEN) -> LayerClass:
    """Embedding, attention with fused projections, dropped-in residuals, head tied to the embedding, mean loss."""
    seq, heads, vocab, inner = dims
    hidden = 4 * heads
    x, split = spec(B, seq, hidden), spec(B, heads, seq, 4)
    values = {
        "ids": spec(B, seq, dtype="int64", grad=False), "labels": spec(B, seq, dtype="int64", grad=False),
        "table": spec(vocab, hidden), "norm_w": spec(hidden), "norm_b": spec(hidden),
        **{f"{n}_w": spec(hidden, hidden) for n in "qkvo"}, "o_b": spec(hidden),
        "up_w": spec(inner, hidden), "up_b": spec(inner), "down_w": spec(hidden, inner), "down_b": spec(hidden),
        "scale": spec(hidden, grad=False),
        **dict.fromkeys(("embedded", "normed", "joined", "attended", "residual", "down", "out"), x),
        **dict.fromkeys(("q", "k", "v"), x), **{f"{n}_split": spec(B, seq, heads, 4) for n in "qkv"},
        **{f"{n}_heads": split for n in "qkv"}, "heads": split, "turned": spec(B, seq, heads, 4),
        "up": spec(B, seq, inner), "gelu": spec(B, seq, inner), "scaled": x,
        "logits": spec(B, seq, vocab), "rows": spec(Extent(seq), vocab),
        "targets": spec(Extent(seq), dtype="int64", grad=False), "loss": spec(),
    }  # fmt: skip
    ops = [
        op("embedded", "aten.embedding.default", "table", "ids"),
        op("normed", "aten.layer_norm.default", "embedded", (hidden,), "norm_w", "norm_b"),
    ]
    for n in "qkv":
        ops += [
            op(n, "aten.linear.default", "normed", f"{n}_w"),
            op(f"{n}_split", "aten.view.default", n, (B, seq, heads, 4)),
            op(f"{n}_heads", "aten.transpose.int", f"{n}_split", 1, 2),
        ]
    ops += [
        op("heads", "aten.scaled_dot_product_attention.default", "q_heads", "k_heads", "v_heads", None, 0.0, True),
        op("turned", "aten.transpose.int", "heads", 1, 2),
        op("joined", "aten.reshape.default", "turned", (B, seq, hidden)),
        op("attended", "aten.linear.default", "joined", "o_w", "o_b"),
        op("residual", "aten.add.Tensor", "embedded", "attended"),
        op("up", "aten.linear.default", "residual", "up_w", "up_b"),
        op("gelu", "aten.gelu.default", "up"),
        op("down", "aten.linear.default", "gelu", "down_w", "down_b"),
        op("scaled", "aten.mul.Tensor", "down", "scale"),
        op("out", "aten.add.Tensor", "residual", "scaled"),
        op("logits", "aten.linear.default", "out", "table"),
        op("rows", "aten.view.default", "logits", (Extent(seq), vocab)),
        op("targets", "aten.view.default", "labels", (Extent(seq),)),
        op("loss", "aten.cross_entropy_loss.default", "rows", "targets"),
    ]
    params = tuple(n for n in values if n.endswith(("_w", "_b")) or n == "table")
    return LayerClass(("ids", "labels"), params, ("scale",), tuple(ops), ("loss", "out"), values)


def whole_values(layer: LayerClass, batch: int, seed: int) -> dict[str, Tensor]:
    """Random whole inputs, parameters and buffers of a layer; an eighth of the labels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in (*layer.inputs, *layer.params, *layer.buffers):
        shape, wanted = layer.values[name].shape_at(batch), layer.values[name]
        if wanted.dtype == "int64":
            found[name] = torch.randint(0, layer.values["table"].shape[0].fixed, shape, generator=generator)
            if name == "labels":
                found[name][torch.rand(shape, generator=generator) < 0.125] = -100
        else:
            found[name] = torch.randn(shape, generator=generator, dtype=getattr(torch, wanted.dtype))
    return found


def random_strategy(layer: LayerClass, sizes: tuple[int, ...], batch: int, seed: int) -> LayerStrategy:
    """Random legal factors for most ops, random storage of parameters and a few random relays."""
    rng = random.Random(seed)
    ops: dict[str, tuple[str, ...]] = {}
    for each in layer.ops:
        rule = rule_for(each, layer)
        if rule and rng.random() < 0.9:
            ops[each.name] = rng.choice(assignments(rule, each, layer, sizes, batch))
    relays = {p: _random_layout(rng, layer.values[p], sizes, (REPLICATE, BROADCAST)) for p in layer.params}
    for name in layer.producer:
        if rng.random() < 0.2:
            relays[name] = _random_layout(rng, layer.values[name], sizes, (REPLICATE, BROADCAST))
    entry = _random_layout(rng, layer.values["ids"], sizes, (REPLICATE,))
    leave = _random_layout(rng, layer.values["out"], sizes, (REPLICATE,))
    return LayerStrategy(entry, leave, ops, relays)


def _random_layout(rng: random.Random, wanted: TensorSpec, sizes: tuple[int, ...], others: tuple[int, ...]) -> Layout:
    return tuple(rng.choice([*range(len(wanted.shape)), *others]) for _ in sizes)
