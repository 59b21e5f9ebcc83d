"""Calls that rules are tried on, and the trial: run on simulated shards against run whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.shard.check import capture, differences
from autopar.shard.rules import LINEAR, assignments, rule_for

Call = tuple[str, tuple[Any, ...], dict[str, Any], str]
"""An op of aten, its arguments and keywords, and the factors that must be on offer."""

COMMUNICATING = ("cross_entropy", "dropout", "batch_norm")
"""Kernels that need real processes, or state, and are tested there."""


def assert_sharded_equals_whole(call: Call, meshes: Sequence[tuple[int, ...]]) -> None:
    """The expected factors are on offer, and results and gradients are the same under every split of them.

    Each is cut unevenly at least once.
    """
    target, arguments, keywords, offered = call
    op, layer, operands = capture(f"aten.{target}", arguments, keywords)
    rule = rule_for(op, layer)
    assert rule is not None
    assert {f.name for f in rule.factors} == set(offered.split())
    uneven = {LINEAR}
    for sizes in meshes:
        for factors in assignments(rule, op, layer, sizes, 1):
            ways = {f: prod(n for n, g in zip(sizes, factors, strict=True) if g == f) for f in factors}
            uneven |= {f.name for f in rule.factors if f.name in ways and f.extent.fixed % ways[f.name]}
            if rule.kernel(factors) not in COMMUNICATING:
                assert differences(rule, op, layer, operands, sizes, factors) == [], (sizes, factors)
    assert {f.name for f in rule.factors} <= uneven


def named(calls: Sequence[Call]) -> list[str]:
    """Names of the tests of calls."""
    return [f"{i}-{call[0]}" for i, call in enumerate(calls)]


_generator = torch.Generator().manual_seed(0)


def reals(*shape: int) -> Tensor:
    """Normal, float64."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    """At least a half."""
    return reals(*shape).abs() + 0.5


def inner(*shape: int) -> Tensor:
    """Between -0.9 and 0.9."""
    return reals(*shape).sigmoid() * 1.8 - 0.9


def whole(high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 to below `high`."""
    return torch.randint(high, shape, generator=_generator)


def truth(*shape: int) -> Tensor:
    """True or false."""
    return reals(*shape) > 0


def complexes(*shape: int) -> Tensor:
    """Real and imaginary parts normal, float64 each."""
    return torch.complex(reals(*shape), reals(*shape))
