"""How two plans differ: in words what was chosen, in figures what makes one faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

from autopar.plan import PlanRecord
from autopar.report.lines import LABEL, Number, item, wrap
from autopar.report.strategy import most_common, name_span, strategy_text, strategy_words
from autopar.report.units import gib_text, seconds_text, share_text

NEGLIGIBLE = 0.01
"""Share of the step time below which a difference isn't worth a word."""


def diff(first: PlanRecord, second: PlanRecord) -> str:
    """Text of at most 80 columns: what was asked and chosen otherwise, and the seconds and bytes by kind."""
    sections = [
        _settings("Asked", asked(first), asked(second)),
        _settings("Chosen", chosen(first), chosen(second)),
        _layers(first, second),
        _time(first, second),
        _memory(first, second),
    ]
    found = ["\n".join(lines) for lines in map(list, sections) if lines]
    return "\n\n".join(found if len(found) > 2 else ["The plans choose the same.", *found])


def diff_data(first: PlanRecord, second: PlanRecord) -> dict[str, Any]:
    """The same as plain data: pairs (first, second) of what differs, seconds and bytes by kind."""
    return {
        "asked": _pairs(asked(first), asked(second)),
        "chosen": _pairs(chosen(first), chosen(second)),
        "layers": [list(row) for row in _layer_rows(first, second)],
        "step_time_s": [first.step_time_s, second.step_time_s],
        "time_by_kind_s": _both(first.time_by_kind_s, second.time_by_kind_s),
        "peak_memory_bytes": [first.peak_memory_bytes, second.peak_memory_bytes],
        "memory_by_category": _both(first.memory_by_category, second.memory_by_category),
    }


def reason(slower: PlanRecord, faster: PlanRecord) -> str:
    """Why one plan takes longer: `12 ms more: 10 ms of communication and 3 ms of bubble, 1 ms less of compute`."""
    total_s = slower.step_time_s - faster.step_time_s
    seconds = _both(faster.time_by_kind_s, slower.time_by_kind_s)
    changes = {kind: after - before for kind, (before, after) in seconds.items()}
    worth = {k: s for k, s in changes.items() if abs(s) >= NEGLIGIBLE * faster.step_time_s}
    more = [f"{seconds_text(s)} of {_kind(k)}" for k, s in _largest_first(worth) if s > 0]
    less = [f"{seconds_text(-s)} of {_kind(k)}" for k, s in _largest_first(worth) if s < 0]
    if not more:
        return f"{seconds_text(total_s)} more" if total_s > 0 else "as fast"
    return f"{seconds_text(total_s)} more: {_and(more)}" + (f", less {_and(less)}" if less else "")


def asked(record: PlanRecord) -> dict[str, str]:
    """What was asked for, in words."""
    r = record.request
    return {
        "model": r.model,
        "cluster": r.cluster,
        "devices": f"{r.devices} x {r.device}",
        "batch": f"{r.global_batch} sequences" + (f" of {r.seq_len} tokens" if r.seq_len else ""),
        "dtype": r.dtype,
        "optimizer": r.optimizer,
        "limit": "what the device has" if r.memory_limit_bytes is None else gib_text(r.memory_limit_bytes),
        "constraints": ", ".join(r.constraints) or "none",
        "config": r.config or "none",
    }


def chosen(record: PlanRecord) -> dict[str, str]:
    """What was chosen for the whole plan, in words."""
    stages = f"{len(record.stages)} on {record.pp_degree} groups of devices" if record.pp_degree > 1 else "one"
    meshes = dict.fromkeys(" x ".join(str(axis.size) for axis in stage.mesh) or "one device" for stage in record.stages)
    return {
        "stages": stages,
        "schedule": record.schedule,
        "cut": "/".join(str(len(stage.assignment)) for stage in record.stages) + " layers",
        "mesh": ", ".join(meshes),
        "microbatches": f"{record.num_microbatches} of {record.global_microbatch} sequences",
        "most layers": most_common(record),
    }


def _settings(title: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    found = _pairs(first, second)
    if found:
        yield title
    for label, (before, after) in found.items():
        yield from item(label, f"{before} -> {after}")


def _pairs(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, list[str]]:
    return {key: [first[key], second[key]] for key in first if first[key] != second[key]}


def _layers(first: PlanRecord, second: PlanRecord) -> Iterator[str]:
    rows = _layer_rows(first, second)
    if rows:
        yield "Layers"
    for span, before, after in rows:
        yield from wrap(f"{span}: {before} -> {after}", "  ", "    ")


def _layer_rows(first: PlanRecord, second: PlanRecord) -> list[tuple[str, str, str]]:
    """Neighbouring layers run otherwise: their names, the strategy in either plan."""
    names = first.layer_names
    if names != second.layer_names:
        return [("all layers", f"{len(names)} layers", f"{len(second.layer_names)} others: not the same model")]
    both = list(zip(names, _by_layer(first), _by_layer(second), strict=True))
    groups = [(key, [name for name, *_ in members]) for key, members in groupby(both, lambda row: row[1:])]
    return [(name_span(members), *map(str, _told(*key))) for key, members in groups if key[0] != key[1]]  # type: ignore[misc]


def _told(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    """Words of two strategies, with their layouts where the words are the same."""
    return (first[1], second[1]) if first[0] == second[0] else (first[0], second[0])


def _by_layer(record: PlanRecord) -> list[tuple[str, str]]:
    """Words, and words with layouts, of the strategy of each layer."""
    strategies = [(stage.strategies[index], stage.mesh) for stage in record.stages for index in stage.assignment]
    return [(strategy_words(*s), strategy_text(*s)) for s in strategies]


def _time(first: PlanRecord, second: PlanRecord) -> Iterator[str]:
    before, after = first.step_time_s, second.step_time_s
    quicker, slower = ("second", "first") if after < before else ("first", "second")
    ratio = max(before, after) / min(before, after) - 1
    yield f"Time: the {quicker} is {share_text(ratio)} faster" if ratio > 1e-9 else "Time: equally fast"
    yield from _columns(_both(first.time_by_kind_s, second.time_by_kind_s), seconds_text, (before, after), "a step")
    if ratio > 1e-9:
        pair = (first, second) if slower == "first" else (second, first)
        yield from wrap(f"The {slower} takes {reason(*pair)}.", "  ", "  ")


def _memory(first: PlanRecord, second: PlanRecord) -> Iterator[str]:
    yield "Memory: at the peak of the fullest device"
    whole = (first.peak_memory_bytes, second.peak_memory_bytes)
    yield from _columns(_both(first.memory_by_category, second.memory_by_category), gib_text, whole, "in all")


def _columns(
    rows: Mapping[str, tuple[Number, Number]], text: Callable[[Number], str], whole: tuple[Number, Number], name: str
) -> Iterator[str]:
    """First, second and difference by kind, those that are 0 in both left out; then their sums."""
    yield f"  {'':<{LABEL}}{'first':>12}{'second':>12}{'difference':>14}"
    for label, (before, after) in {**rows, name: whole}.items():
        if before or after:
            change = after - before
            signed = ("+" if change > 0 else "-" if change < 0 else "") + text(abs(change))
            yield f"  {_kind(label):<{LABEL}}{text(before):>12}{text(after):>12}{signed:>14}"


def _both(first: Mapping[str, Number], second: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
    nothing = {**dict.fromkeys(first, 0), **dict.fromkeys(second, 0)}
    before, after = nothing | dict(first), nothing | dict(second)
    return {key: (before[key], after[key]) for key in nothing}


def _largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda pair: -abs(pair[1]))


def _kind(name: str) -> str:
    return name.replace("_", " ")


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
