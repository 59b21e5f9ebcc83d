"""Which group of devices runs which stages of a pipeline, by schedule. Torch-free."""

from __future__ import annotations

from functools import lru_cache

V_SHAPED = ("zbv", "dualpipev")
"""Schedules of two stages a group, laid out there and back: stage g and stage 2 p - 1 - g are on group g of p."""

SPLIT = ("zb", "zbv", "dualpipev")
"""Schedules that make gradients of inputs and those of weights in passes of their own."""


def group_of(schedule: str, stage: int, groups: int) -> int:
    """The group of devices of a stage: in turn, or there and back."""
    lap, place = divmod(stage, groups)
    return groups - 1 - place if schedule in V_SHAPED and lap % 2 else place


@lru_cache(maxsize=4096)
def stages_of(schedule: str, group: int, groups: int, stages: int) -> tuple[int, ...]:
    """The stages of a group of devices, in order of the model."""
    return tuple(s for s in range(stages) if group_of(schedule, s, groups) == group)
