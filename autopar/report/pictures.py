"""Pictures of a plan: its seconds, its bytes, its step in time and what its layers do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from typing import Any

from autopar.plan import RECOMPUTES, PlanRecord
from autopar.report.held import held_over_time
from autopar.report.page import Picture
from autopar.report.strategy import name_span, strategy_text
from autopar.report.timeline import LANES, Event, Slot, slots, step_events
from autopar.roles import ways
from autopar.schedules import group_of

COLOURS = {
    "compute": "#4c78a8", "forward": "#4c78a8", "backward": "#9d5fa0", "recompute": "#9ecae9", "bubble": "#c9c4bd",
    "communication": "#f58518", "optimizer": "#54a24b", "parameters": "#4c78a8", "gradients": "#9d5fa0",
    "activations": "#f58518", "transient": "#e8c55a", "reserve": "#c9c4bd",
    "measured": "#54a24b", "fitted": "#9ecae9", "roofline": "#f58518", "extrapolated": "#c44e52",
}  # fmt: skip
"""One colour a kind; `X communication` has that of communication."""
MOST_BARS, MOST_GROUPS, MOST_LAYERS = 4000, 16, 40
"""Bars of a timeline, groups of devices, and runs of layers that are shown at most."""
GIB = 1 << 30


def seconds(records: Mapping[str, PlanRecord]) -> Picture:
    """The seconds of a step by kind, a bar a plan."""
    kinds = list(dict.fromkeys(kind for r in records.values() for kind, s in r.time_by_kind_s.items() if s > 0))
    traces = [
        _bars(kind, [1e3 * r.time_by_kind_s.get(kind, 0.0) for r in records.values()], list(records), "%{x:.4g} ms")
        for kind in kinds
    ]
    return _stacked(traces, "ms", len(records))


def sources(record: PlanRecord) -> Picture:
    """The share of the seconds from each source."""
    shares = [_bars(name, [100 * s], [""], "%{x:.3g} %") for name, s in record.cost_sources.items() if s > 0]
    return _stacked(shares, "share of the seconds, %", 1)


def layers(record: PlanRecord) -> Picture:
    """Seconds of a step on one device by run of equal layers, those that take most."""
    rows = sorted(_layer_seconds(record), key=lambda row: -sum(row[1].values()))[:MOST_LAYERS]
    names = [name for name, _ in rows]
    kinds = list(dict.fromkeys(kind for _, row in rows for kind, s in row.items() if s > 0))
    traces = [_bars(k, [1e3 * row.get(k, 0.0) for _, row in rows], names, "%{x:.4g} ms") for k in kinds]
    return _stacked(traces, "ms a step", len(rows), left=230)


def memory(record: PlanRecord, limit_bytes: int | None) -> Picture:
    """Bytes at the peak of a device of each group, by category, beside what may be used."""
    by_group = record.costs.group_memory or (record.memory_by_category,)
    shown = _spread(len(by_group))
    names = [_group_name(record, g) for g in shown]
    kinds = [kind for kind in record.memory_by_category if any(by_group[g].get(kind) for g in shown)]
    traces = [
        _bars(kind, [by_group[g].get(kind, 0) / GIB for g in shown], names, "%{x:.4g} GiB", across=True)
        for kind in kinds
    ]
    limit = [] if limit_bytes is None else [_limit_line(limit_bytes / GIB)]
    layout = {"barmode": "stack", "yaxis": {"title": {"text": "GiB"}}, "shapes": limit}
    return Picture(traces, layout, 340)


def held(record: PlanRecord) -> Picture:
    """Bytes kept on a device of each group as the step goes by."""
    lines = held_over_time(record)
    traces = [
        {"type": "scatter", "mode": "lines", "name": _group_name(record, g), "x": [1e3 * p.at_s for p in lines[g]],
         "y": [p.size_bytes / GIB for p in lines[g]], "hovertemplate": "%{y:.4g} GiB at %{x:.4g} ms"}
        for g in _spread(len(lines))
    ]  # fmt: skip
    return Picture(
        traces, {"xaxis": {"title": {"text": "ms"}}, "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"}}
    )


def timeline(record: PlanRecord) -> tuple[Picture, str]:
    """The step in time, and what of it is left out: of a pipeline a lane a group, of one stage what its layers do."""
    if record.pp_degree == 1:
        return _stage_timeline(record)
    found = list(slots(record))
    kept = _shown(record.num_microbatches, len(found))
    bars: dict[str, list[Slot]] = {}
    for slot in found:
        if slot.microbatch in kept:
            bars.setdefault(slot.way, []).append(slot)
    traces = [
        _timed(
            way, [(_lane(record, s), s.start_s, s.end_s, f"stage {s.stage}, microbatch {s.microbatch}") for s in own]
        )
        for way, own in bars.items()
    ]
    lanes = [f"group {g}" for g in range(record.pp_degree)]
    return _lanes(traces, lanes, record), _left_out(record.num_microbatches, kept)


def strategies(record: PlanRecord) -> Picture:
    """What each layer does: ways by role, ZeRO level, recomputation and stage, in rows over the layers."""
    placed = [(number, stage, index) for number, stage in enumerate(record.stages) for index in stage.assignment]
    rows: dict[str, list[int]] = {}
    texts: list[str] = []
    for at, (number, stage, index) in enumerate(placed):
        strategy = stage.strategies[index]
        numbers = {f"{role} ways": count for role, count in ways(strategy, stage.mesh).items()}
        recompute = RECOMPUTES.index(strategy.recompute)
        for name, value in (numbers | {"ZeRO": strategy.zero, "recompute": recompute, "stage": number}).items():
            rows.setdefault(name, [0] * len(placed))[at] = value
        texts.append(f"{record.layer_names[at]}<br>stage {number}: {strategy_text(strategy, stage.mesh)}")
    heat = {
        "type": "heatmap", "z": [[log2(value + 1) / log2(max(row) + 2) for value in row] for row in rows.values()],
        "x": list(range(len(placed))), "y": list(rows), "zmin": 0, "zmax": 1.2, "xgap": 1, "ygap": 2,
        "text": list(rows.values()), "customdata": [texts] * len(rows), "showscale": False,
        "hovertemplate": "%{customdata}<extra></extra>", "colorscale": [[0, "#eef2f6"], [1, "#2f5d8a"]],
    }  # fmt: skip
    if len(placed) <= MOST_LAYERS:
        heat["texttemplate"] = "%{text}"
    layout = {"xaxis": {"title": {"text": "layer"}}, "yaxis": {"autorange": "reversed"}}
    return Picture([heat], layout, 110 + 34 * len(rows))


# --- how ------------------------------------------------------------------------------------------------------------


def _stage_timeline(record: PlanRecord) -> tuple[Picture, str]:
    events = step_events(record)
    kept = _shown(record.num_microbatches, len(events))
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        if event.microbatch is None or event.microbatch in kept:
            by_kind.setdefault(event.kind, []).append(event)
    traces = [
        _timed(kind, [(e.lane, e.start_s, e.start_s + e.duration_s, e.name) for e in own])
        for kind, own in by_kind.items()
    ]
    return _lanes(traces, LANES, record), _left_out(record.num_microbatches, kept)


def _shown(microbatches: int, bars: int) -> set[int]:
    """Microbatches that are shown: all, or the first and last ones where that would be too many bars."""
    most = max(2, MOST_BARS * microbatches // max(bars, 1))
    if microbatches <= most:
        return set(range(microbatches))
    return {*range(most - most // 2), *range(microbatches - most // 2, microbatches)}


def _left_out(microbatches: int, kept: set[int]) -> str:
    missing = [m for m in range(microbatches) if m not in kept]
    return f" Microbatches {missing[0]} to {missing[-1]} are left out." if missing else ""


def _timed(kind: str, bars: Sequence[tuple[str, float, float, str]]) -> dict[str, Any]:
    """A trace of bars from (lane, start, end, text)."""
    return {
        "type": "bar", "orientation": "h", "name": kind, "marker": {"color": _colour(kind), "line": {"width": 0.3,
        "color": "white"}}, "y": [b[0] for b in bars], "base": [1e3 * b[1] for b in bars],
        "x": [1e3 * (b[2] - b[1]) for b in bars], "text": [b[3] for b in bars], "textposition": "none",
        "hovertemplate": "%{text}<br>%{x:.4g} ms from %{base:.5g}<extra>" + kind + "</extra>",
    }  # fmt: skip


def _lanes(traces: Sequence[Mapping[str, Any]], lanes: Sequence[str], record: PlanRecord) -> Picture:
    across = {"title": {"text": "ms"}, "range": [0, 1e3 * record.step_time_s]}
    down = {"categoryorder": "array", "categoryarray": list(reversed(lanes))}
    layout = {"barmode": "overlay", "xaxis": across, "yaxis": down}
    return Picture(traces, layout, 150 + 22 * max(3, len(lanes)))


def _lane(record: PlanRecord, slot: Slot) -> str:
    return f"group {group_of(record.schedule, slot.stage, record.pp_degree)}"


def _layer_seconds(record: PlanRecord) -> Iterator[tuple[str, dict[str, float]]]:
    at = 0
    for cost in record.costs.layers:
        kinds = {part: record.num_microbatches * cost.count * s for part, s in cost.pass_s.items()}
        for kind, s in cost.step_s.items():
            kinds[kind] = kinds.get(kind, 0.0) + cost.count * s
        yield name_span(record.layer_names[at : at + cost.count]), kinds
        at += cost.count


def _bars(kind: str, values: Sequence[float], names: Sequence[str], hover: str, across: bool = False) -> dict[str, Any]:
    name = "exposed communication" if kind == "communication" else kind
    sides = {"x": list(names), "y": list(values)} if across else {"x": list(values), "y": list(names)}
    return {
        "type": "bar", "orientation": "v" if across else "h", "name": name, "marker": {"color": _colour(kind)},
        "hovertemplate": hover.replace("x:", "y:") if across else hover, **sides,
    }  # fmt: skip


def _stacked(traces: Sequence[Mapping[str, Any]], unit: str, bars: int, left: int = 110) -> Picture:
    down = {"type": "category", "autorange": "reversed"}
    margin = {"l": left, "r": 20, "t": 10, "b": 45}
    layout = {"barmode": "stack", "xaxis": {"title": {"text": unit}}, "yaxis": down, "margin": margin}
    return Picture(traces, layout, 130 + 26 * max(bars, 1))


def _limit_line(gib: float) -> dict[str, Any]:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": gib, "y1": gib, "line": {"dash": "dot"}}


def _spread(count: int) -> list[int]:
    """At most so many of `count` groups: the first, the last, and some between."""
    if count <= MOST_GROUPS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_GROUPS - 1)) for i in range(MOST_GROUPS)})


def _group_name(record: PlanRecord, group: int) -> str:
    return f"group {group}" if record.pp_degree > 1 else "every device"


def _colour(kind: str) -> str:
    if kind.endswith("communication"):
        return COLOURS["communication"]
    return COLOURS.get(kind, "#888888")
