"""What a model of seconds is: a closed form of sizes and hardware, with named constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autopar.measure.models.beyond import Polynomial

Array: TypeAlias = NDArray[np.float64]
Sizes: TypeAlias = Mapping[str, Array]
"""Columns of what is to be priced, one row a call, all of one shape."""


@dataclass(frozen=True)
class Hardware:
    """What a form needs to know of a device for one dtype.

    `units` compute at once (multiprocessors, cores), each a tile of a product at a time, whose sides are multiples of
    `tile`; `launch_s` is the datasheet's guess of what starting a kernel costs.
    """

    flops_per_s: float
    bytes_per_s: float
    units: int
    element_bytes: float
    launch_s: float
    tile: int = 64


LEAST_SHARE = 0.001
"""Shares are kept so far from 0 and 1."""


@dataclass(frozen=True)
class Constant:
    """A constant: where it starts, how far it may be expected from there, and the scale on which that is meant."""

    name: str
    start: float
    spread: float
    scale: Literal["log", "share", "plain"] = "log"

    def plain(self, value: float) -> float:
        """The value on the scale on which it is fitted."""
        if self.scale == "log":
            return float(np.log(value))
        if self.scale == "share":
            inside = min(max(value, LEAST_SHARE), 1 - LEAST_SHARE)
            return float(np.log(inside / (1 - inside)))
        return value

    def value(self, plain: float) -> float:
        """Inverse of `plain`."""
        if self.scale == "log":
            return float(np.exp(plain))
        return float(1 / (1 + np.exp(-plain))) if self.scale == "share" else plain


FASTER = 1.1
"""Times the rate that a form reaches at best: no call that is priced is faster."""


@dataclass(frozen=True)
class Limit:
    """FLOPs of calls, shape (calls,), and the FLOP/s that a form with some constants reaches at best."""

    flops: Callable[[Sizes], Array]
    rate: Callable[[Array, Hardware], float]


@dataclass(frozen=True)
class Form:
    """A family's closed form: seconds of calls, shape (calls,), from the constants' values in their order.

    `beyond` says what else timings may teach of it; `limit` how fast calls are at most, where they compute.
    """

    family: str
    constants: tuple[Constant, ...]
    seconds: Callable[[Array, Sizes, Hardware], Array]
    beyond: Polynomial | None = None
    limit: Limit | None = None

    def priced(self, constants: Array, coefficients: Array, sizes: Sizes, hardware: Hardware) -> Array:
        """Seconds by the form and, where there are coefficients, by what is known beyond it; shape (calls,)."""
        seconds = self.seconds(constants, sizes, hardware)
        if self.beyond is None or not len(coefficients):
            return seconds
        seconds = seconds * np.exp(np.clip(self.beyond.at(coefficients, sizes), -MOST_BEYOND, MOST_BEYOND))
        return seconds if self.limit is None else np.maximum(
            seconds, self.limit.flops(sizes) / (FASTER * self.limit.rate(constants, hardware))
        )  # fmt: skip

    def start(self, **known: float) -> Array:
        """Where the constants start, those that are `known` in their place."""
        return np.array([known.get(c.name, c.start) for c in self.constants])

    def plain(self, values: Array) -> Array:
        """Constants on the scales on which they are fitted."""
        return np.array([c.plain(float(v)) for c, v in zip(self.constants, values, strict=True)])

    def values(self, plain: Array) -> Array:
        """Inverse of `plain`."""
        return np.array([c.value(float(p)) for c, p in zip(self.constants, plain, strict=True)])


MOST_BEYOND = 1.0
"""Logarithm of the largest factor by which anything differs from its form."""

LEAST_SHARPNESS = 0.5


def joined(first: Array, second: Array, sharpness: float) -> Array:
    """What two limits make together: their larger one, rounded where they are near each other."""
    sharpness = max(sharpness, LEAST_SHARPNESS)
    larger = np.maximum(np.maximum(first, second), 1e-30)
    smaller = np.minimum(first, second)
    result: Array = larger * (1 + (smaller / larger) ** sharpness) ** (1 / sharpness)
    return result


def waves(work: Array, step: float) -> Array:
    """Rounds in which units do `work` (in units' shares): between what it is and the next whole number, 1 at least."""
    return np.maximum((1 - step) * work + step * np.ceil(work), 1.0)


def joined_numbers(first: float, second: float, sharpness: float) -> float:
    """`joined` of two numbers."""
    larger, smaller = max(first, second, 1e-30), min(first, second)
    return larger * float((1 + (smaller / larger) ** sharpness) ** (1 / sharpness))
