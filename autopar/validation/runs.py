"""Rows of training and memory tables as runs: the model, the plan, the cluster, and what was assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite

from autopar.cluster import Cluster, DeviceFile, Link
from autopar.dims import Dims
from autopar.errors import ConfigError
from autopar.schedules import V_SHAPED
from autopar.transformer.layout import COMPUTE, MODERN, NARROW, Conventions, Layout
from autopar.validation.public_models import dims_of
from autopar.validation.words import (
    DTYPES,
    RECOMPUTES,
    SCHEDULES,
    Zero,
    device_in,
    framework_in,
    value_in,
    zero_in,
)

OPEN = ("unknown", "unspecified", "not stated", "not printed", "nan", "n/a", "na", "null", "-", "?")
"""Words for what a source doesn't say; `none` is one in columns of numbers only."""

FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
"""What parts thousands of a number, as in 4,096."""

RACK = 64
"""Devices of a rack-scale NVLink domain of 72 that jobs use."""

PADDED_GPT2, LLAMA_VOCAB = 51200, 32000
"""Vocabularies where none is given: GPT-2's as Megatron pads it for eight ways, and Llama's."""


@dataclass(frozen=True)
class Run:
    """A row read: what ran, how and where; `assumed` says what the row left open and what was taken."""

    shape: Dims
    layout: Layout
    cluster: Cluster
    device: DeviceFile
    global_batch: int
    assumed: tuple[str, ...]

    @property
    def leanest(self) -> Layout:
        """The layout, recomputed wholly where the row doesn't say how much is."""
        open_ = any(text.startswith("recompute=") for text in self.assumed)
        return replace(self.layout, recomputed=1.0) if open_ else self.layout


def stated(row: Mapping[str, str], column: str) -> str:
    """The text of a column; empty where its words mean nothing."""
    found = (row.get(column) or "").strip()
    return "" if found.lower() in OPEN else found


@dataclass
class _Reader:
    """Columns of a row, with what was assumed on the way."""

    row: Mapping[str, str]
    public: Mapping[str, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        return stated(self.row, column)

    def number(self, column: str, default: int | None, why: str = "") -> int:
        """A whole number of a column; the default is noted. Raises ConfigError for what is none, or needed."""
        text = self.text(column)
        if not text and column in self.public:
            default, why = self.public[column], "the public model's"
        if not text or text.lower() == "none":
            if default is None:
                raise ConfigError(f"{column} is missing")
            self.assumed.append(f"{column}={default}" + (f" ({why})" if why else ""))
            return default
        value = decimal(THOUSANDS.sub("", text))
        if value is None or value < 0 or value != int(value):
            raise ConfigError(f"{column}={text!r} is not a whole number")
        return int(value)

    def flag(self, column: str, default: bool) -> bool:
        """Yes or no, in words or as 1 or 0; the default is noted."""
        known = FLAGS.get(self.text(column).lower())
        return bool(self.number(column, int(default))) if known is None else known

    def say(self, what: str) -> None:
        self.assumed.append(what)


def decimal(text: str | None) -> float | None:
    """A finite number, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) else None


def read_run(row: Mapping[str, str]) -> Run:
    """Read a row. Raises ConfigError with the reason where it can't be predicted."""
    reader = _Reader(row, dims_of(row.get("model_name", "")))
    device, alias = device_in(reader.text("gpu"))
    if alias != " ".join(reader.text("gpu").lower().split()):
        reader.say(f"gpu={device.name} (for {reader.text('gpu')!r})")
    conventions = framework_in(reader.text("framework"))
    if conventions is None:
        conventions = MODERN
        reader.say(f"framework={MODERN.name}")
    shape = _shape(reader, conventions)
    layout, batch = _layout(reader, shape, device, conventions)
    return Run(shape, layout, _cluster(reader, device, layout), device, batch, tuple(reader.assumed))


# --- the model ------------------------------------------------------------------------------------------------------


def _shape(reader: _Reader, conventions: Conventions) -> Dims:
    arch = reader.text("arch").lower()
    if "mamba" in arch or "hybrid" in arch:
        raise ConfigError(f"arch={arch!r}: only decoders whose blocks are all attention and feed-forward")
    layers, hidden = reader.number("layers", None), reader.number("hidden", None)
    gpt = arch == "gpt" or (not arch and "gpt" in reader.text("model_name").lower())
    heads = reader.number("heads", max(1, hidden // 128), "128 wide")
    if min(layers, hidden, heads) < 1:
        raise ConfigError(f"layers={layers}, hidden={hidden}, heads={heads}: must be at least 1")
    gated = reader.flag("gated_mlp", not gpt)
    third = -(-(8 * hidden) // (3 * 256)) * 256
    experts = reader.number("experts", 0) if reader.text("experts") else 0
    found = Dims(
        layers=layers, hidden=hidden, heads=heads, kv_heads=reader.number("kv_heads", heads),
        head_dim=_head_dim(reader, hidden, heads),
        ffn=reader.number("ffn_hidden", third if gated else 4 * hidden),
        vocab=reader.number("vocab", PADDED_GPT2 if gpt else LLAMA_VOCAB),
        seq=reader.number("seq_len", 2048), gated=gated,
        tied=_tied(reader, conventions, gpt), bias=gpt, positions=gpt,
        experts=experts if experts > 1 else 0, topk=reader.number("topk", 2) if experts > 1 else 0,
    )  # fmt: skip
    least = min(found.kv_heads, found.head_dim, found.ffn, found.vocab, found.seq, found.topk or not found.experts)
    if least < 1:
        raise ConfigError(f"kv_heads, head_dim, ffn_hidden, vocab, seq_len and topk must be at least 1: {found}")
    return found


def _tied(reader: _Reader, conventions: Conventions, usual: bool) -> bool:
    if conventions.unties and not reader.text("tied_embeddings"):
        reader.say("tied_embeddings=0 (the framework's)")
        return False
    return reader.flag("tied_embeddings", usual)


def _head_dim(reader: _Reader, hidden: int, heads: int) -> int:
    if reader.text("head_dim"):
        return reader.number("head_dim", None)
    return 128 if hidden % heads else hidden // heads


# --- the plan -------------------------------------------------------------------------------------------------------


def _layout(reader: _Reader, shape: Dims, device: DeviceFile, conventions: Conventions) -> tuple[Layout, int]:
    tp, pp, cp = reader.number("tp", 1), reader.number("pp", 1), reader.number("cp", 1)
    gpus = reader.number("gpus", None)
    if gpus < 1:
        raise ConfigError(f"gpus={gpus}: must be at least 1")
    if min(tp, pp, cp) < 1 or gpus % (tp * pp * cp):
        raise ConfigError(f"tp*pp*cp = {tp}*{pp}*{cp} does not divide gpus={gpus}")
    dp = gpus // (tp * pp * cp)
    stated = decimal(reader.text("dp"))
    if stated and stated != dp:
        if stated * tp * pp != gpus:
            raise ConfigError(f"dp*tp*pp*cp = {stated:.0f}*{tp}*{pp}*{cp} is not gpus={gpus}")
        reader.say(f"dp={dp} (cp taken out of dp={stated:.0f})")
    elif not stated:
        reader.say(f"dp={dp}")
    chunks = (
        2 if _schedule(reader, 1) in V_SHAPED else max(1, reader.number("virtual_stages", _usual_chunks(reader, pp)))
    )
    if chunks > 1 and (pp == 1 or shape.layers < pp * chunks):
        reader.say(f"virtual_stages=1 (not {chunks}: {shape.layers} layers on {pp} stages)")
        chunks = 1
    if shape.layers < pp:
        raise ConfigError(f"layers={shape.layers} can't be dealt out over pp={pp} stages")
    local = (decimal(reader.text("global_batch_seqs")) or 0) / dp
    usual = int(local // pp) if conventions.whole_batch and local >= pp else 1
    size = max(1, reader.number("micro_batch", usual))
    counted = max(conventions.usual_batch // (dp * size), 4 if pp > 1 else 1)
    batch = reader.number("global_batch_seqs", dp * size * counted) or dp * size
    if batch < dp:
        raise ConfigError(f"global_batch_seqs={batch} is less than dp={dp}")
    count = max(1, round(batch / (dp * size)))
    if count * dp * size != batch:
        size = max(1, round(batch / (dp * count)))
        reader.say(f"{count} microbatches of {size} (for a global batch of {batch} on dp={dp})")
    dtype = _dtype(reader, conventions, device)
    zero = _zero(reader, conventions)
    recompute, share = _recompute(reader, conventions, shape, gpus)
    layout = Layout(
        dp=dp, tp=tp, cp=cp, ep=_experts(reader, shape, dp * cp * tp), pp=pp, chunks=chunks,
        schedule=_schedule(reader, chunks), microbatch=size, num_microbatches=count, zero=zero.level,
        zero_ways=min(_per_node(reader, device, gpus), gpus) // (tp if tp < 8 else 1) if zero.ways < 0 else zero.ways,
        sequence=reader.flag("sequence_parallel", conventions.sequence and tp > 1) and tp > 1,
        recomputed=share if recompute == "full" else 0.0, selective=recompute == "selective",
        fused_attention=reader.flag("flash_attention", conventions.fused_attention),
        compute=COMPUTE[dtype], gemm_dtype=NARROW.get(dtype, COMPUTE[dtype]), conventions=conventions,
    )  # fmt: skip
    return layout, batch


def _dtype(reader: _Reader, conventions: Conventions, device: DeviceFile) -> str:
    text = reader.text("dtype")
    if text:
        dtype = value_in("dtype", text, DTYPES)
    else:
        dtype = "fp16" if conventions.dropout or "bfloat16" not in device.peak_tflops else "bf16"
        reader.say(f"dtype={dtype}")
    needed = NARROW.get(dtype, COMPUTE[dtype])
    for name in (COMPUTE[dtype], needed):
        if name not in device.peak_tflops:
            raise ConfigError(f"dtype={dtype}: device {device.name} has no rate for {name}")
    return dtype


def _zero(reader: _Reader, conventions: Conventions) -> Zero:
    text = reader.text("zero_stage")
    if not text:
        reader.say(f"zero_stage={conventions.zero}")
        return Zero(conventions.zero)
    return zero_in(text)


def _recompute(reader: _Reader, conventions: Conventions, shape: Dims, devices: int) -> tuple[str, float]:
    """The kind of recomputation, and the share of blocks: all, or those that `full:8` or `block 8` counts."""
    text = reader.text("recompute")
    if not text:
        usual = (conventions.recompute_alone if devices == 1 else "") or conventions.recompute
        reader.say(f"recompute={usual}")
        return usual, 1.0
    counted = re.search(r"(?:full|block|uniform)\D{1,3}(\d+)", text.lower())
    share = min(1.0, int(counted[1]) / shape.layers) if counted else 1.0
    return value_in("recompute", text, RECOMPUTES), share


def _usual_chunks(reader: _Reader, pp: int) -> int:
    """Stages a device where a row doesn't say: 2, the least there are, where it says that they are interleaved."""
    text = reader.text("schedule")
    return 2 if pp > 1 and text and value_in("schedule", text, SCHEDULES) == "interleaved" else 1


def _schedule(reader: _Reader, chunks: int) -> str:
    text = reader.text("schedule")
    known = value_in("schedule", text, SCHEDULES) if text else ""
    if known in ("", "1f1b", "interleaved"):
        return "interleaved" if chunks > 1 else "1f1b"
    return known


def _experts(reader: _Reader, shape: Dims, ranks: int) -> int:
    if not shape.experts:
        return 1
    ep = max(1, reader.number("ep", 1))
    if ranks % ep:
        raise ConfigError(f"ep={ep} does not divide dp*cp*tp = {ranks}")
    return min(ep, shape.experts)


# --- the cluster ----------------------------------------------------------------------------------------------------


def _per_node(reader: _Reader, device: DeviceFile, gpus: int) -> int:
    if "nvl72" in " ".join(device.aliases):
        return RACK
    return max(1, min(reader.number("gpus_per_node", 8) if reader.text("gpus_per_node") else 8, max(gpus, 1)))


def _cluster(reader: _Reader, device: DeviceFile, layout: Layout) -> Cluster:
    """The cluster of a row. Links the row gives a rate for have that rate, at the share that the device's file says."""
    per_node = _per_node(reader, device, layout.devices)
    nodes = -(-layout.devices // per_node)
    intra = _link(reader, "interconnect_intra", device.intra.link(), device.intra.efficiency)
    inter = _link(reader, "interconnect_inter", device.inter.link(), device.inter.efficiency)
    return Cluster(f"{nodes}x{per_node}x{device.name}", device.device(), nodes, per_node, intra, inter)


def _link(reader: _Reader, column: str, usual: Link, share: float) -> Link:
    stated = decimal(reader.text(column))
    if not stated or stated <= 0:
        reader.say(f"{column}={usual.bytes_per_s / share / 1e9:.4g}")
        return usual
    return replace(usual, bytes_per_s=stated * 1e9 * share)
