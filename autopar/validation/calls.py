"""Rows of operator tables as calls that can be priced: device, dtype, sizes, and which fits may stand for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import numpy as np

from autopar.cluster import Device, DeviceFile, Link, find_device
from autopar.cost.collectives import KINDS, one_link_seconds
from autopar.errors import ConfigError
from autopar.measure.models.attention import BACKWARD
from autopar.measure.models.form import Array, Sizes
from autopar.rows import Table

DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16",
    "fp32": "float32", "float32": "float32", "float": "float32", "fp64": "float64", "float64": "float64",
    "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "nvfp4": "float4_e2m1fn_x2", "mxfp4": "float4_e2m1fn_x2", "fp4": "float4_e2m1fn_x2",
}  # fmt: skip
"""Names that sources have for dtypes."""

COLLECTIVES = {"alltoall": "all_to_all", "allreduce": "all_reduce", "allgather": "all_gather",
               "reducescatter": "reduce_scatter", "sendrecv": "send_recv"}  # fmt: skip

ROW_OPS = ("softmax", "layer_norm", "rms_norm", "fused_add_rms_norm", "cross_entropy")
"""Operators that reduce each row: what a row costs counts."""


@dataclass(frozen=True)
class Call:
    """One row: what is called, on which device, and the seconds measured (None where the row has none).

    `sizes` are those its family's form wants; `variants` name the fits that may stand for it, the nearest first.
    `key` is the call's shape without its source; `usual` says whether training asks for calls so large.
    """

    index: int
    family: str
    device: DeviceFile
    op: str
    dtype: str
    variants: tuple[str, ...]
    key: tuple[object, ...]
    sizes: Mapping[str, float]
    measured_s: float | None
    usual: bool
    source: str


@dataclass(frozen=True)
class Skipped:
    """A row that can't be predicted, and why."""

    index: int
    reason: str


def read_calls(table: Table, first: int = 0) -> list[Call | Skipped]:
    """The calls of a table's rows, numbered from `first`."""
    return [_call(table.kind, row, first + i) for i, row in enumerate(table.rows)]


def _call(kind: str, row: Mapping[str, str], index: int) -> Call | Skipped:
    try:
        device = known_device(row["gpu"])
        op, dtype, variants, sizes, usual = _READERS[kind](row, device)
        key = tuple(row.get(column, "") for column in _KEYS[kind])
        measured = number(row, "time_us") * 1e-6 if row.get("time_us") else None
    except ConfigError as error:
        return Skipped(index, str(error))
    return Call(index, kind, device, op, dtype, variants, key, sizes, measured, usual, row.get("source", ""))


_KEYS = {
    "gemm": ("gpu", "dtype", "m", "n", "k", "batch"),
    "attention": ("gpu", "dtype", "batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal", "direction"),
    "elementwise": ("gpu", "op", "dtype", "rows", "cols", "direction"),
    "collectives": ("gpu", "link", "collective", "n_ranks", "n_nodes", "bytes"),
}


@lru_cache(maxsize=1024)
def known_device(name: str) -> DeviceFile:
    """The device a source names; raises ConfigError for an unknown one."""
    return find_device(name)


def number(row: Mapping[str, str], column: str, default: float | None = None) -> float:
    """A positive number of a row; raises ConfigError that names the column and the value."""
    text = row.get(column, "")
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise ConfigError(f"{column}={text!r} is not a positive number")
    return value


def software(source: str) -> str:
    """Who timed it with what, without versions: of `suite/library-1.2.3/kernel` the library, else the suite."""
    parts = source.lower().split("/")
    named = next((part for part in parts if re.search(r"-v?\d", part)), parts[0])
    return re.sub(r"(-v?\d[\w.]*)+$", "", named)


def _last(source: str) -> str:
    """The last part of a source, without a dtype's name."""
    return re.sub(r"-(half|int8|bfloat16|float16)$", "", source.lower().rpartition("/")[2])


Reading = tuple[str, str, tuple[str, ...], Mapping[str, float], bool]


def _dtype(row: Mapping[str, str], device: DeviceFile) -> str:
    dtype = DTYPES.get(row["dtype"].lower(), row["dtype"])
    if dtype not in device.peak_tflops:
        known = ", ".join(sorted(device.peak_tflops))
        raise ConfigError(f"device {device.name!r} has no peak FLOP/s for {row['dtype']}; it has {known}")
    return dtype


def _gemm(row: Mapping[str, str], device: DeviceFile) -> Reading:
    dtype = _dtype(row, device)
    m, n, k, batch = number(row, "m"), number(row, "n"), number(row, "k"), number(row, "batch", 1)
    width = {"float32": 4, "float64": 8, "float8_e4m3fn": 1, "float4_e2m1fn_x2": 0.5}.get(dtype, 2)
    sizes = {"m": m, "n": n, "k": k, "batch": batch, "bytes": batch * (m * k + k * n + m * n) * width}
    return "gemm", dtype, (software(row.get("source", "")), ""), sizes, m >= 1024 and min(n, k) >= 512


def _attention(row: Mapping[str, str], device: DeviceFile) -> Reading:
    dtype = _dtype(row, device)
    names = ("batch", "heads", "seq_q", "head_dim")
    sizes = {name: number(row, name) for name in names}
    sizes["kv_heads"] = number(row, "kv_heads", sizes["heads"])
    sizes["seq_kv"] = number(row, "seq_kv", sizes["seq_q"])
    sizes["causal"] = float(row.get("causal", "1") in ("1", "1.0", "True", "true") and sizes["seq_q"] > 1)
    direction = row.get("direction") or "fwd"
    passes = {"fwd": 1.0, "bwd": BACKWARD, "fwd+bwd": 1 + BACKWARD}
    if direction not in passes:
        raise ConfigError(f"direction={direction!r} is not one of {', '.join(passes)}")
    sizes["passes"] = passes[direction]
    source = row.get("source", "")
    variants = (f"{software(source)} {_last(source)}", "")
    return f"attention {direction}", dtype, variants, sizes, sizes["batch"] * sizes["seq_q"] >= 2048


def _elementwise(row: Mapping[str, str], device: DeviceFile) -> Reading:
    del device
    op, direction = row["op"], row.get("direction") or "fwd"
    dtype = DTYPES.get(row["dtype"].lower(), row["dtype"])
    rows, columns = number(row, "rows"), number(row, "cols")
    moved = number(row, "bytes", rows * columns * 2 * {"float32": 4, "float64": 8}.get(dtype, 2))
    there = op if direction == "fwd" else f"{op} {direction}"
    sizes = {"bytes": moved, "rows": rows if op in ROW_OPS else 0.0}
    source = row.get("source", "")
    named = f"{software(source)} {_last(source)}" if "/" in source else software(source)
    return there, dtype, (f"{there}@{named}", there, op, ""), sizes, True


def _collectives(row: Mapping[str, str], device: DeviceFile) -> Reading:
    kind = row["collective"].lower()
    kind = COLLECTIVES.get(kind.replace("_", ""), kind)
    ranks, nodes, moved = number(row, "n_ranks"), number(row, "n_nodes", 1), number(row, "bytes")
    link = (device.inter if nodes > 1 else device.intra).link()
    closed_s = closed_seconds(kind, moved, int(ranks), link)
    peak = Link(link.name, (device.inter if nodes > 1 else device.intra).gb_per_s * 1e9, 0.0)
    where = f"{kind} {ranks:.0f}" + (f"/{nodes:.0f}" if nodes > 1 else "")
    source = row.get("source", "")
    there = f"{where} {row['link']}"
    named = f"{software(source)} {_last(source)}" if "/" in source else software(source)
    sizes = {
        "bytes": moved,
        "ranks": ranks,
        "closed_s": closed_s,
        "link_s": closed_seconds(kind, moved, int(ranks), peak),
    }
    variants = (f"{there}@{source.lower()}", f"{there}@{named}", there, where)
    return kind, "", variants, sizes, moved >= 2**20 and nodes == 1


def closed_seconds(kind: str, moved: float, ranks: int, link: Link) -> float:
    """Seconds by a link alone; raises ConfigError for an unknown kind."""
    if kind == "send_recv":
        return link.latency_s + moved / link.bytes_per_s
    if kind not in KINDS:
        raise ConfigError(f"collective {kind!r} is not one of {', '.join((*KINDS, 'send_recv'))}")
    return one_link_seconds(kind, moved, max(ranks, 2), link)


_READERS: dict[str, Callable[[Mapping[str, str], DeviceFile], Reading]] = {
    "gemm": _gemm, "attention": _attention, "elementwise": _elementwise, "collectives": _collectives,
}  # fmt: skip


def columns(calls: Sequence[Call]) -> Sizes:
    """Sizes of calls of one family as columns."""
    names = calls[0].sizes if calls else ()
    return {name: np.array([call.sizes[name] for call in calls], dtype=np.float64) for name in names}


def measured(calls: Sequence[Call]) -> Array:
    """Measured seconds, NaN where there are none."""
    return np.array([np.nan if call.measured_s is None else call.measured_s for call in calls])


def base_device(file: DeviceFile) -> Device:
    """The device of a file (made once a file)."""
    return _base(file.name)


@lru_cache(maxsize=256)
def _base(name: str) -> Device:
    return find_device(name).device()
