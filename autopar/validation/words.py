"""Words of sources for devices, dtypes, ZeRO, schedules, recomputation and frameworks: one table, and its reading.

Texts are compared in small letters, runs of other characters than letters, digits and points as one blank. The longest
known alias found in a text wins. What can't be read raises ConfigError, which names what is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TypeVar

from autopar.cluster import DeviceFile, all_devices
from autopar.errors import ConfigError
from autopar.transformer import layout
from autopar.transformer.layout import Conventions

FRAMEWORKS: Mapping[str, Conventions] = {
    "megatron": layout.MODERN, "megatron lm": layout.MODERN, "megatron core": layout.MODERN, "mcore": layout.MODERN,
    "pai megatron": layout.MODERN, "megatron deepspeed": layout.CLASSIC_ZERO, "megatron lm 2021": layout.CLASSIC,
    "megatron lm v1": layout.CLASSIC, "megatron lm v2": layout.CLASSIC, "flagscale": layout.MODERN,
    "galvatron": layout.GALVATRON, "colossalai": layout.MODERN, "nanotron": layout.MODERN, "gpt neox": layout.CLASSIC,
    "nemo": layout.TUNED, "nemo megatron core": layout.TUNED, "megatron bridge": layout.TUNED,
    "transformer engine": layout.TUNED, "paddlenlp": layout.PADDLE, "paddle": layout.PADDLE,
    "internevo": layout.INTERNEVO, "internlm": layout.INTERNEVO, "torchtitan": layout.TORCHTITAN,
    "torchtitan 2025": layout.TORCHTITAN_2025, "torchtitan 2026": layout.TORCHTITAN_2025, "fsdp": layout.FSDP,
    "fsdp2": layout.FSDP, "pytorch": layout.FSDP, "fms fsdp": layout.COMPILED, "torch compile": layout.COMPILED,
    "nemo automodel": layout.TUNED_FSDP, "automodel": layout.TUNED_FSDP, "maxtext": layout.COMPILED,
    "paxml": layout.COMPILED, "jax": layout.COMPILED, "litgpt": layout.LITGPT, "lightning": layout.FSDP,
    "accelerate": layout.FSDP, "llm foundry": layout.FSDP, "composer": layout.FSDP, "hf trainer": layout.FSDP,
    "ddp": layout.FSDP, "deepspeed": layout.DEEPSPEED, "hf trainer deepspeed": layout.DEEPSPEED,
    "zero": layout.DEEPSPEED,
}  # fmt: skip

TRAINERS: Mapping[str, Conventions] = {
    "torchtune": layout.FSDP, "axolotl": layout.FSDP, "llama factory": layout.FSDP, "unsloth": layout.FSDP,
    "trl": layout.FSDP, "transformers": layout.FSDP, "xtuner": layout.FSDP, "vescale": layout.FSDP,
    "primus": layout.MODERN, "mindspeed": layout.MODERN,
}  # fmt: skip
"""What runs on others' frameworks, with that which it takes by itself where a text doesn't name one."""

EDITIONS: Mapping[str, tuple[float, Conventions]] = {"megatron bridge": (26.06, layout.TUNED_2026)}
"""Frameworks that do as these conventions say from a version on, which stands behind their name."""

DTYPES: Mapping[str, str] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32",
    "float32": "fp32", "tf32": "fp32", "fp8": "fp8", "float8": "fp8", "fp8 cs": "fp8", "fp8 mx": "mxfp8",
    "mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "nvfp4", "bf16 fp16 amp": "bf16", "amp": "bf16",
    "mixed": "bf16",
}  # fmt: skip

SCHEDULES: Mapping[str, str] = {
    "none": "1f1b", "1f1b": "1f1b", "one forward one backward": "1f1b", "pipedream flush": "1f1b", "gpipe": "gpipe",
    "interleaved": "interleaved", "interleaved 1f1b": "interleaved", "interleaved or 1f1b": "", "not stated": "",
    "pipedream": "1f1b", "dapple": "1f1b",
    "afab": "gpipe", "zb": "zb", "zb h1": "zb", "zero bubble": "zb", "zbv": "zbv", "zb v": "zbv",
    "dualpipe": "dualpipev", "dualpipev": "dualpipev",
}  # fmt: skip

RECOMPUTES: Mapping[str, str] = {
    "none": "none", "off": "none", "no": "none", "0": "none", "false": "none", "selective": "selective",
    "full": "full", "block": "full", "uniform": "full", "1": "full", "true": "full", "yes": "full", "all": "full",
    "checkpointing": "full", "checkpoint": "full", "ac": "full",
    "selective op": "selective", "core attention": "selective", "core attn": "selective", "moe act": "selective",
    "layernorm": "selective", "mla up proj": "selective",
}  # fmt: skip

Value = TypeVar("Value")


def plain(text: str) -> str:
    """Small letters and digits, all else as single blanks."""
    return " ".join(re.findall(r"[a-z0-9.]+", text.lower()))


def longest(text: str, table: Mapping[str, Value]) -> tuple[str, Value] | None:
    """The longest key of `table` that stands in `text` as whole words, with its value."""
    words = f" {plain(text)} "
    found = [key for key in table if f" {key} " in words]
    best = max(found, key=len, default=None)
    return None if best is None else (best, table[best])


def value_in(column: str, text: str, table: Mapping[str, Value]) -> Value:
    """What the text of a column means; raises ConfigError where nothing known stands in it."""
    found = longest(text, table)
    if found is None:
        raise ConfigError(f"{column}={text!r} is not known; it should name one of {', '.join(sorted(table))}")
    return found[1]


@dataclass(frozen=True)
class Zero:
    """A ZeRO level and the ranks that share, 0 for all data ranks, -1 for those of a node."""

    level: int
    ways: int = 0


def zero_in(text: str) -> Zero:
    """Read `1 (optimizer states over 8 dp ranks)`, `fsdp2 (shard 64)`, `hsdp`, `2`; raises ConfigError."""
    words = plain(text)
    group = re.search(r"(?:group|shard|over|size) (\d+)\b", words)
    ways = int(group[1]) if group else 0
    if match := re.match(r"(?:zero )?(?:stage )?([0-3])\b", words):
        return Zero(int(match[1]), ways)
    if re.search(r"\bshard grad op\b", words):
        return Zero(2, ways)
    if re.search(r"\bno shard\b|\bno zero\b", words):
        return Zero(0)
    if re.search(r"\b(?:hsdp|hybrid shard)", words):
        return Zero(3, ways or -1)
    if re.search(r"\bfsdp|\bfully? shard|\bzero ?3|\bparameters\b", words):
        return Zero(3, ways)
    if match := re.search(r"\bzero ?(?:stage )?([0-3])", words):
        return Zero(int(match[1]), ways)
    if re.search(r"distributed optimizer|optimizer states?", words):
        return Zero(1, ways)
    if re.search(r"\bddp\b|\bnone\b|data parallel", words):
        return Zero(0)
    raise ConfigError(f"zero_stage={text!r} is not known; give 0 to 3, ddp, distributed optimizer, fsdp or hsdp")


SIZE_APART = 0.1
"""Memory that a text names is a device's where it is no further from it."""


@lru_cache(maxsize=1024)
def device_in(text: str) -> tuple[DeviceFile, str]:
    """The device that a text names, and the alias found: the longest one. Raises ConfigError where there is none.

    Where the text also names gigabytes that aren't those of the device but of another of its family, it is that one:
    `A100-SXM4-40GB` is no A100 of 80 GB.
    """
    known = {plain(key): device for device in all_devices() for key in (device.name, *device.aliases)}
    found = longest(text, known)
    if found is None:
        raise ConfigError(f"gpu={text!r} is not known; `autopar devices` lists those there are")
    alias, device = found
    size = re.search(r"(\d+) ?gi?b?\b", plain(text))
    if size and not _has(device, int(size[1])):
        family, pcie = device.name.partition("-")[0], "pcie" in plain(text)
        others = [d for d in all_devices() if d.name.partition("-")[0] == family and _has(d, int(size[1]))]
        device = next((d for d in others if ("pcie" in d.name) == pcie), device)
    return device, alias


def _has(device: DeviceFile, gigabytes: int) -> bool:
    return abs(device.memory_gib / gigabytes - 1) <= SIZE_APART


def framework_in(text: str) -> Conventions | None:
    """Conventions of the framework that a text names; None where it is empty or unknown."""
    if re.search(r"zero ?-?3", text.lower()):
        return layout.DEEPSPEED
    words = re.sub(r"\b(v\d|20\d\d)[-.\d]*", r"\1", text.lower())
    found = longest(words, FRAMEWORKS) or longest(words, TRAINERS)
    if found is None:
        return None
    since, newer = EDITIONS.get(found[0], (inf, found[1]))
    version = re.search(rf"\b{found[0]} v?(\d+\.\d+)", plain(text))
    return newer if version and float(version[1]) >= since else found[1]
