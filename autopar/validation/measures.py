"""What a row measured: seconds of a step, bytes of everything or of a part, and whether memory ran out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.errors import ConfigError
from autopar.transformer.memory import KEPT_LOGITS, Bytes, stage_bytes
from autopar.validation.runs import FLAGS, Run, decimal, stated
from autopar.validation.words import plain

GB, GIB = 1e9, 2**30

ENDED_WELL = ("", "ok", "okay", "success", "succeeded", "completed", "complete", "done", "finished", "passed", "valid")
"""Words for a run that ended as it should."""

OUT_OF_MEMORY = re.compile(r"\boom\b|\bout of (?:device |gpu )?memory\b")

PARTS: Mapping[str, str] = {
    "parameters": r"param(?:eter)?s?|weights?|model", "gradients": r"grad(?:ient)?s?",
    "optimizer": r"optim(?:izer)?|moments?|adamw?", "activations": r"activations?",
    "transient": r"transient|temporar\w+",
}  # fmt: skip
"""Words for parts of a device's bytes."""

TOTAL = r"total|peak|max(?:imum)?|memory|all|overall|allocated|reserved|used"


def component_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """The parts that a memory row measures, none for everything. Raises ConfigError for words that name no part.

    `model states` and `states` are parameters, gradients and the optimizer's states; a peak of activations has the
    temporaries of the passes in it.
    """
    text = plain(stated(row, "component"))
    if not text or text in ("model states", "states", "static"):
        return ("parameters", "gradients", "optimizer") if text else ()
    found = tuple(part for part, words in PARTS.items() if re.search(rf"\b(?:{words})\b", text))
    if not found and not re.search(rf"\b(?:{TOTAL})\b", text):
        raise ConfigError(f"component={text!r} is not known; it should name total, states, {', '.join(PARTS)}")
    return (*found, "transient") if found == ("activations",) and "peak" in text.split() else found


def held_bytes(row: Mapping[str, str], component: tuple[str, ...], run: Run, peak: Bytes) -> float:
    """Bytes predicted of what a row measures: a total as its tool sees it, or the sum of the parts it names."""
    how = plain(stated(row, "mem_kind"))
    if not component:
        how = how or run.layout.conventions.shows
        if "allocated" in how:
            return peak.tensors
        return peak.tensors + peak.slack if "reserved" in how else peak.total
    group = 0 if "rank 0" in how else run.layout.pp - 1
    here = stage_bytes(run.shape, run.layout, group) if "rank" in how else peak
    sizes = {
        "parameters": here.parameters, "gradients": here.gradients, "optimizer": here.optimizer,
        "activations": here.activations, "transient": here.transient - here.gathered,
    }  # fmt: skip
    kept = KEPT_LOGITS * here.logits if "activations" in component and "transient" not in component else 0.0
    return sum(sizes[part] for part in component) + kept


def measured_bytes(row: Mapping[str, str]) -> float | None:
    """Bytes measured. A gigabyte is 1e9, but whole numbers of tools that show GiB are GiB."""
    value = decimal(row.get("peak_mem_gb"))
    if not value or value <= 0:
        return None
    kind = plain(row.get("mem_kind", ""))
    gib = ("nvidia smi" in kind or "integer gib" in kind) and value == int(value)
    return value * (GIB if gib else GB)


def ran_out(row: Mapping[str, str]) -> bool:
    """Whether the run ended for want of memory."""
    flag = stated(row, "oom").lower()
    return FLAGS.get(flag, decimal(flag) == 1) or bool(OUT_OF_MEMORY.search(plain(row.get("status", ""))))


def ended_well(row: Mapping[str, str]) -> bool:
    """Whether what was measured counts: the run neither failed nor ran out of memory."""
    return plain(stated(row, "status")) in ENDED_WELL and not ran_out(row)


def measured_s(row: Mapping[str, str], run: Run) -> tuple[float | None, bool]:
    """Measured seconds of a step of a run that ended well, and whether the source's formula was inverted for them."""
    if not ended_well(row):
        return None, False
    step, rate, inverted = (decimal(row.get(c)) or 0.0 for c in ("step_time_s", "tokens_per_s_per_gpu", MEASURED[2]))
    if step > 0:
        return step, False
    if rate > 0:
        return run.global_batch * run.shape.seq / rate / run.layout.devices, False
    return (inverted, True) if inverted > 0 else (None, False)


MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "step_time_est_s", "peak_mem_gb")


def unread(row: Mapping[str, str]) -> list[str]:
    """What is said of measurements that aren't any: the row is predicted, and not compared with them."""
    found = [
        f"{column}={row[column]!r}: no positive number, left out"
        for column in MEASURED
        if row.get(column) and not (decimal(row[column]) or 0.0) > 0
    ]
    if not ended_well(row):
        found.append(f"status={row.get('status') or 'oom'!r}: its step time isn't compared")
    return found
