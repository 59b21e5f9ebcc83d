"""How many random examples a property is tried on."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings

USUAL, THOROUGH = 100, 1000
"""Examples of a property that doesn't say how many, in usual runs and under `--hypothesis-profile=thorough`."""


def examples(count: int, *, derandomize: bool = False, suppress: Collection[HealthCheck] = ()) -> settings:
    """Settings of `count` examples in usual runs, and of as many times more as the profile asks for."""
    default = settings.default
    assert default is not None
    return settings(
        max_examples=count * default.max_examples // USUAL,
        derandomize=derandomize,
        suppress_health_check=[*default.suppress_health_check, *suppress],
    )
