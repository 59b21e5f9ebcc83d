"""A plan as one page to look at: where its seconds and bytes go, what its layers do, and why to believe it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autopar.cluster import find_device
from autopar.errors import ConfigError
from autopar.plan import PlanRecord
from autopar.report import pictures
from autopar.report.compare import asked, chosen, reason
from autopar.report.explain import explain
from autopar.report.page import Section, Table, write_page
from autopar.report.units import count_text, gib_text, seconds_text, share_text


def write_report(record: PlanRecord, path: Path) -> None:
    """Write the page. Raises ConfigError where plotly is not installed, PlanError for a plan that carries no costs."""
    kind = "estimate" if record.lower_bound_s is None else "plan"
    write_page(f"{record.request.model} on {record.request.cluster}: {kind}", list(_sections(record)), path)


def _sections(record: PlanRecord) -> Iterator[Section]:
    timeline, left_out = pictures.timeline(record)
    yield Section("In short", "", [Table(list(_short(record).items()))])
    yield Section(
        "Seconds of a step",
        "Communication is what nothing hides; of a pipeline the group that works longest is shown, and its bubble.",
        [pictures.seconds({"": record})],
    )
    yield Section(
        "The step in time",
        f"Hover for what is done.{left_out} Drag to look closer, click twice to come back.",
        [timeline],
    )
    yield Section(
        "Memory by device",
        "At the peak of a device. The dotted line is what may be used.",
        [pictures.memory(record, _limit_bytes(record))],
    )
    yield Section(
        "Memory over time",
        "States, gradients once they are made, and what backward passes will need. Temporaries come on top: with them "
        f"the peak of tensors is {gib_text(record.peak_tensor_bytes)}.",
        [pictures.held(record)],
    )
    yield Section(
        "What the layers do",
        "A row a property; recompute: 1 light, 2 selective, 3 full. Hover for a layer's name and layouts.",
        [pictures.strategies(record)],
    )
    yield from _others(record)
    yield Section(
        "Where the seconds come from",
        "By layers, on one device; and by what the figures rest on: measured on a device, fitted between measurements, "
        "computed from a datasheet (roofline), or extrapolated.",
        [pictures.layers(record), pictures.sources(record)],
    )
    assumed = Table([["•", assumption] for assumption in record.assumptions])
    yield Section("Assumptions", "" if record.assumptions else "None.", [assumed])
    yield Section("In words", "", [explain(record)])


def _short(record: PlanRecord) -> dict[str, str]:
    answer = {"step": seconds_text(record.step_time_s)}
    if record.tokens_per_s is not None:
        answer["tokens"] = f"{record.tokens_per_s:,.0f} a second, {record.tokens_per_s_per_device or 0:,.0f} a device"
    if record.mfu is not None:
        answer["MFU"] = share_text(record.mfu)
    answer["memory"] = f"{gib_text(record.peak_memory_bytes)} at the peak of the fullest device"
    if record.gap is not None and record.lower_bound_s is not None:
        answer["bound"] = (
            f"no plan searched is below {seconds_text(record.lower_bound_s)}: within {share_text(record.gap)}"
        )
    if record.energy_j is not None:
        answer["energy"] = f"{record.energy_j / 1e3:,.3g} kJ a step"
    if not record.feasible:
        answer["feasible"] = "NO: it needs more memory than there is"
    return {**asked(record), "parameters": count_text(record.num_params), **chosen(record), **answer}


def _others(record: PlanRecord) -> Iterator[Section]:
    if not record.alternatives:
        return
    named = {"this plan": record} | {f"plan {n}": r for n, r in enumerate(record.alternatives, start=2)}
    rows = [
        [name, seconds_text(r.step_time_s), gib_text(r.peak_memory_bytes), f"stages: {chosen(r)['stages']}",
         chosen(r)["most layers"], "" if r is record else f"takes {reason(r, record)}"]
        for name, r in named.items()
    ]  # fmt: skip
    yield Section("Alternatives", "The fastest plans of other kinds.", [pictures.seconds(named), Table(rows)])


def _limit_bytes(record: PlanRecord) -> int | None:
    """The bytes that the bars, reserve included, are held against."""
    asked_bytes = record.request.memory_limit_bytes
    if asked_bytes is not None:
        return asked_bytes + record.memory_by_category.get("reserve", 0)
    with suppress(ConfigError):
        return find_device(record.request.device).device().usable_bytes
    return None
