"""The pipelines that can be run: legal cells of schedule, ZeRO and recomputation, for search and emission alike."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from autopar.schedules import V_SHAPED


@dataclass(frozen=True)
class Cell:
    """What a schedule may be combined with; layers of one plan may mix all of it."""

    zero_levels: frozenset[int]
    recomputes: frozenset[str]


_ALL = Cell(frozenset({0, 1, 2, 3}), frozenset({"none", "light", "selective", "full"}))

_NAMES = ("none", "accumulate", "gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")
CELLS = dict.fromkeys(_NAMES, _ALL)
"""What each schedule that can be run allows. Under a pipeline ZeRO 2 and 3 keep whole gradients until the step ends."""

ONE_STAGE = ("none", "accumulate")
"""Schedules of plans without a pipeline."""


def refusal(
    schedule: str,
    zero_levels: Set[int],
    recomputes: Set[str],
    stages: int,
    num_microbatches: int | None = None,
    groups: int | None = None,
) -> str:
    """Why a plan of `stages` stages can't be run: what is wrong and what would do; '' if it can.

    `zero_levels`, `recomputes`: all that any layer uses. `groups` of devices share the stages, by default one each;
    without `num_microbatches` its rules are not looked at.
    """
    if schedule not in CELLS:
        return f"schedule {schedule!r} is not known; it is one of {', '.join(CELLS)}"
    groups = stages if groups is None else groups
    return _combined(schedule, zero_levels, recomputes) or misfit(schedule, stages, groups, num_microbatches)


def misfit(schedule: str, stages: int, groups: int, num_microbatches: int | None = None) -> str:
    """Why a schedule can't be laid out for these stages on these groups of devices; '' if it can."""
    return _staged(schedule, stages, groups) or _counted(schedule, groups, num_microbatches)


def _combined(schedule: str, zero_levels: Set[int], recomputes: Set[str]) -> str:
    cell = CELLS[schedule]
    if zero_levels - cell.zero_levels:
        return f"schedule {schedule} with ZeRO {sorted(zero_levels - cell.zero_levels)}: {sorted(cell.zero_levels)} do"
    if recomputes - cell.recomputes:
        unknown, legal = sorted(recomputes - cell.recomputes), sorted(cell.recomputes)
        return f"schedule {schedule} with recomputation {', '.join(unknown)}: {', '.join(legal)} do"
    return ""


def _staged(schedule: str, stages: int, groups: int) -> str:
    if schedule in ONE_STAGE:
        return "" if stages == 1 else f"schedule {schedule} has one stage, not {stages}: gpipe, 1f1b, interleaved do"
    if groups < 2:
        return f"schedule {schedule} needs at least 2 groups of devices, not {groups}; one stage needs no schedule"
    if schedule in V_SHAPED:
        return "" if stages == 2 * groups else f"{schedule} needs 2 stages for each of {groups} groups, not {stages}"
    if schedule == "zb":
        each = stages % groups == 0
        return "" if each else f"zb needs as many stages for each of {groups} groups; there are {stages}"
    if schedule == "interleaved":
        several = stages % groups == 0 and stages > groups
        return "" if several else f"interleaved needs 2, 3, ... stages for each of {groups} groups; there are {stages}"
    return "" if stages == groups else f"schedule {schedule} has one stage a group; {stages} on {groups}: interleaved"


def _counted(schedule: str, groups: int, num_microbatches: int | None) -> str:
    if num_microbatches is None:
        return ""
    if schedule == "none" and num_microbatches > 1:
        return f"schedule none has one microbatch, not {num_microbatches}: accumulate does"
    if schedule == "1f1b" and num_microbatches < groups:
        return f"1f1b needs a microbatch for each of {groups} stages, not {num_microbatches}: give more, or take gpipe"
    if schedule == "dualpipev" and num_microbatches < 2 * groups:
        return f"dualpipev needs a microbatch for each of {2 * groups} stages, not {num_microbatches}: zbv takes fewer"
    if schedule in ("interleaved", "zb") and num_microbatches % max(1, num_microbatches // groups):
        return (
            f"{schedule} over {groups} groups can't deal {num_microbatches} microbatches out to equal rounds: "
            f"a multiple of {groups} can"
        )
    return ""
