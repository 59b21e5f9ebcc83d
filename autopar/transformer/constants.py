"""Constants that calibrate a step: what is reached in training beside what operators reach alone.

They are few, and belong to a generation of devices or a kind of link, never to a model or a source. Shipped ones are
in `profiles/steps.toml`, written by `python -m benchmarks.fit_steps`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, log

from autopar.cluster import profiles_folder


@dataclass(frozen=True)
class Prior:
    """A constant: its name, what is expected of it beforehand, how far it may be from there, and on which scale.

    One that differs `by` generation of devices has a common value and a factor for each.
    """

    name: str
    expected: float
    spread: float
    scale: str = "log"
    by: str = ""

    def plain(self, value: float) -> float:
        """The value on the scale on which it is fitted."""
        if self.scale == "share":
            inside = min(max(value, 1e-3), 1 - 1e-3)
            return log(inside / (1 - inside))
        return log(value) if self.scale == "log" else value

    def value(self, plain: float) -> float:
        """Inverse of `plain`."""
        if self.scale == "share":
            return 1 / (1 + exp(-plain))
        return exp(plain) if self.scale == "log" else plain


PRIORS = (
    Prior("gemm", 1.2, 0.08, by="device"),
    Prior("narrow", 1.0, 0.1, by="device"),
    Prior("grouped", 1.3, 0.3, by="device"),
    Prior("attention", 1.2, 0.15, by="device"),
    Prior("plain_attention", 1.2, 0.2),
    Prior("moved", 1.25, 0.15, by="device"),
    Prior("kernel_us", 8.0, 0.3),
    Prior("gap_us", 2.0, 0.5),
    Prior("call_us", 60.0, 0.7),
    Prior("inside", 0.95, 0.15, by="link"),
    Prior("between", 1.2, 0.12, by="network"),
    Prior("round_us", 14.0, 0.15),
    Prior("tensor_hidden", 0.5, 1.0, "share"),
    Prior("context_hidden", 0.8, 1.0, "share"),
    Prior("data_hidden", 0.8, 1.0, "share"),
    Prior("shard_hidden", 0.5, 0.3, "share"),
    Prior("optimizer", 1.3, 0.3),
    Prior("step_ms", 10.0, 0.7),
    Prior("pass_us", 100.0, 0.7),
    Prior("straggle", 0.004, 0.7),
    Prior("routing", 1.5, 0.5),
)
"""All constants, in the order in which they are fitted. A round of messages is expected to take what NCCL's own model
says of a hop of a ring between nodes."""

SPREAD_OF_GENERATIONS, SPREAD_OF_DEVICES, SPREAD_OF_LINKS = 0.1, 0.05, 0.1
"""How far factors are expected from 1, in the logarithm: of a generation from all, of a device from its generation.
Narrow, as operators and collectives timed alone have told devices and links apart before."""


@dataclass(frozen=True)
class Constants:
    """Values by name; those of a generation or link by `name@which`, as factors of the common one."""

    table: Mapping[str, float]

    def of(self, name: str, *kinds: str) -> float:
        """The constant for a generation, a device or a link: the common one times the factors of those there are."""
        value = self.table[name]
        for kind in kinds:
            value *= self.table.get(f"{name}@{kind}", 1.0)
        return value

    @classmethod
    def expected(cls) -> Constants:
        """What is expected before anything is fitted."""
        return cls({known.name: known.expected for known in PRIORS})


@cache
def shipped_constants() -> Constants:
    """Constants that come with autopar."""
    path = profiles_folder() / "steps.toml"
    if not path.is_file():
        return Constants.expected()
    found = tomllib.loads(path.read_text(encoding="utf-8"))["constants"]
    return Constants(Constants.expected().table | found)
