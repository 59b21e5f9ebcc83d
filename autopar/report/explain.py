"""A plan in words: what was asked, what was chosen, what is predicted and why it should be believed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby

from autopar.cluster import find_device
from autopar.errors import ConfigError
from autopar.plan import LayerStrategy, PlanRecord, StagePlan
from autopar.report.compare import reason
from autopar.report.lines import item, table, wrap
from autopar.report.strategy import most_common, name_span, strategy_text
from autopar.report.units import count_text, gib_text, seconds_text, share_text
from autopar.schedules import group_of

SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim.", "activations": "activ.",
         "transient": "temp.", "reserve": "reserve"}  # fmt: skip
ORDER = ("parameters", "gradients", "optimizer", "activations", "transient", "reserve")


def explain(record: PlanRecord) -> str:
    """Text of at most 80 columns that says what `record` does and costs."""
    sections = [
        _heading(record),
        _asked(record),
        _chosen(record),
        *(_stage(record, number) for number in range(len(record.stages))),
        _time(record),
        _memory(record),
        _groups_of_devices(record),
        _trust(record),
        _alternatives(record),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _heading(record: PlanRecord) -> Iterator[str]:
    kind = "estimate" if record.lower_bound_s is None else "plan"
    yield f"{kind} by autopar {record.autopar_version}".rstrip()
    if not record.feasible:
        yield "NOT FEASIBLE: it needs more memory than there is (see below)"
    if not record.runnable:
        yield "predicted only: it can't be run by autopar"
    if not record.exact:
        yield "not exact: training computes something else than on one device"


def _asked(record: PlanRecord) -> Iterator[str]:
    r = record.request
    length = f" of {r.seq_len} tokens" if r.seq_len else ""
    yield "Asked"
    yield from item("model", f"{r.model}, {count_text(record.num_params)} parameters")
    yield from item("cluster", f"{r.cluster}: {r.devices} x {r.device}")
    yield from item("step", f"{r.global_batch} sequences{length}, {r.dtype}, {r.optimizer}")
    yield from item("objective", r.objective.replace("_", " "))
    if r.memory_limit_bytes is not None:
        yield from item("limit", f"{gib_text(r.memory_limit_bytes)} of tensors a device")
    if r.constraints:
        yield from item("constraints", ", ".join(r.constraints))
    if r.config:
        yield from item("config", r.config)


def _chosen(record: PlanRecord) -> Iterator[str]:
    used = len({device for stage in record.stages for device in stage.devices})
    idle = f", {record.request.devices - used} idle" if used < record.request.devices else ""
    stages = f"{len(record.stages)} stages ({record.schedule})" if record.pp_degree > 1 else "one stage"
    if record.pp_degree < len(record.stages):
        stages += f" on {record.pp_degree} groups of devices"
    yield "Chosen"
    yield from item("devices", f"{used}{idle}, {stages}")
    yield from item("layers", most_common(record))
    yield from item(
        "microbatches",
        f"{record.num_microbatches} of {record.global_microbatch} sequences ({record.microbatch_size} a data replica)",
    )


def _stage(record: PlanRecord, number: int) -> Iterator[str]:
    stage = record.stages[number]
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in stage.mesh) or "one device"
    yield f"Stage {number}: {len(stage.devices)} devices {_ranks(stage.devices)}, mesh {mesh}"
    ranks = [rank for group in record.stages[: record.pp_degree] for rank in group.devices]
    placed = dict(zip(ranks, record.placement, strict=False))
    there = [placed[rank] for rank in stage.devices]
    if there != list(stage.devices):
        yield f"  on the cluster's devices {_ranks(tuple(there))}"
    for first, last, strategy in _groups(stage):
        names = record.layer_names[stage.first_layer + first : stage.first_layer + last + 1]
        yield from wrap(f"{name_span(names)}: {strategy_text(strategy, stage.mesh)}", "  ", "    ")


def _groups(stage: StagePlan) -> Iterator[tuple[int, int, LayerStrategy]]:
    """Runs of neighbouring layers of one strategy: first and last position in the stage."""
    position = 0
    for index, members in groupby(stage.assignment):
        length = len(list(members))
        yield position, position + length - 1, stage.strategies[index]
        position += length


def _ranks(devices: tuple[int, ...]) -> str:
    """`0-7`, or the ranks one by one where they aren't neighbours."""
    if len(devices) > 2 and devices == tuple(range(devices[0], devices[0] + len(devices))):
        return f"{devices[0]}-{devices[-1]}"
    listed = ",".join(map(str, devices[:8]))
    return listed + (",..." if len(devices) > 8 else "")


def _time(record: PlanRecord) -> Iterator[str]:
    yield f"Time: {seconds_text(record.step_time_s)} a step"
    shown = {"exposed comm." if kind == "communication" else kind: s for kind, s in record.time_by_kind_s.items()}
    yield from table(shown, seconds_text, record.step_time_s)
    if record.tokens_per_s is not None:
        per_device = record.tokens_per_s_per_device or 0.0
        yield from item("tokens", f"{record.tokens_per_s:,.0f} a second, {per_device:,.0f} a device")
    if record.energy_j is not None:
        yield from item("energy", f"{record.energy_j / 1e3:,.3g} kJ a step{_per_token(record, record.energy_j, 'J')}")
    if record.step_price is not None:
        yield from item("price", f"{record.step_price:,.3g} a step{_per_token(record, 1e6 * record.step_price, '')}")
    mfu = f", {share_text(record.mfu)} of the device's peak" if record.mfu is not None else ""
    yield from item("model FLOPs", f"{record.tflops_per_device:.3g} TFLOP/s a device{mfu}")


def _per_token(record: PlanRecord, value: float, unit: str) -> str:
    """`, 0.12 J a token`; prices are given for a million of them."""
    if record.tokens_per_s is None:
        return ""
    each = value / (record.tokens_per_s * record.step_time_s)
    return f", {each:.3g} {unit} a token" if unit else f", {each:.3g} for a million tokens"


def _memory(record: PlanRecord) -> Iterator[str]:
    yield f"Memory: {gib_text(record.peak_memory_bytes)} at the peak of the fullest device"
    known = [key for key in ORDER if key in record.memory_by_category]
    others = [key for key in record.memory_by_category if key not in ORDER]
    ordered = {key: record.memory_by_category[key] for key in known + others}
    yield from table(ordered, gib_text, record.peak_memory_bytes)
    yield from item("limit", _limit_text(record))


def _groups_of_devices(record: PlanRecord) -> Iterator[str]:
    """Of a pipeline seconds and bytes by group of devices; neighbours that are alike share a line."""
    carried, groups = record.costs, record.pp_degree
    if groups == 1 or len(carried.group_memory) != groups:
        return
    rows = [
        [*_busy(record, g), *(gib_text(carried.group_memory[g].get(key, 0)) for key in ORDER)] for g in range(groups)
    ]
    yield "By group of devices: busy and idle of the step, and memory"
    yield from _row("group", ["busy", "idle", *(SHORT[key] for key in ORDER)])
    for row, members in groupby(range(groups), key=lambda g: rows[g]):
        alike = list(members)
        yield from _row(str(alike[0]) if len(alike) == 1 else f"{alike[0]}-{alike[-1]}", row)


def _row(label: str, cells: Sequence[str]) -> Iterator[str]:
    yield f"  {label:<7}" + "".join(f"{cell:>{8 if i < 2 else 9}}" for i, cell in enumerate(cells))


def _busy(record: PlanRecord, group: int) -> tuple[str, str]:
    """Shares of the step in which a group works, and waits."""
    m, mine = (
        record.num_microbatches,
        [c for c in record.costs.layers if group_of(record.schedule, c.stage, record.pp_degree) == group],
    )
    seconds = sum(c.count * (m * sum(c.pass_s.values()) + sum(c.step_s.values())) for c in mine)
    share = (seconds + record.costs.shared_s[group]) / record.step_time_s
    return share_text(share), share_text(max(0.0, 1 - share))


def _limit_text(record: PlanRecord) -> str:
    tensors, limit = record.peak_tensor_bytes, record.request.memory_limit_bytes
    if limit is not None:
        return f"{gib_text(tensors)} of tensors of the {gib_text(limit)} allowed ({share_text(tensors / limit)})"
    with suppress(ConfigError):
        usable = find_device(record.request.device).device().usable_bytes
        return f"{share_text(record.peak_memory_bytes / usable)} of the device's {gib_text(usable)} usable"
    return "what the device can use"


def _trust(record: PlanRecord) -> Iterator[str]:
    yield "How sure"
    if record.lower_bound_s is not None and record.gap is not None:
        yield from item(
            "bound",
            f"no plan searched is faster than {seconds_text(record.lower_bound_s)}: "
            f"this one is within {share_text(record.gap)}",
        )
    shares = sorted(record.cost_sources.items(), key=lambda item: -item[1])
    yield from item("seconds from", ", ".join(f"{share_text(share)} {source}" for source, share in shares if share))
    yield from item("took", f"{seconds_text(record.trace_s)} to trace, {seconds_text(record.search_s)} to search")
    for number, assumption in enumerate(record.assumptions):
        yield from item("assumed" if number == 0 else "", assumption)


def _alternatives(record: PlanRecord) -> Iterator[str]:
    if record.alternatives:
        yield "Alternatives"
    for number, other in enumerate(record.alternatives, start=2):
        slower = other.step_time_s / record.step_time_s - 1
        yield from wrap(
            f"{number}. {seconds_text(other.step_time_s)} ({slower:+.1%}), {gib_text(other.peak_memory_bytes)}: "
            f"{_pipeline_words(other)}{other.num_microbatches} microbatches, {most_common(other)}",
            "  ",
            "     ",
        )
        yield from wrap(f"It takes {reason(other, record)}.", "     ", "     ")


def _pipeline_words(record: PlanRecord) -> str:
    return f"{len(record.stages)} stages ({record.schedule}), " if record.pp_degree > 1 else ""
