"""The best plan by size of a cluster, as a table of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.plan import PlanRecord
from autopar.report.lines import wrap
from autopar.report.strategy import most_common
from autopar.report.units import gib_text, seconds_text, share_text


@dataclass(frozen=True)
class Size:
    """The best plan on a cluster of so many devices, or why there is none.

    `marginal_return`: what each device added since the last size with a plan brings, in samples a second, as a share of
    what each brings at the first such size; None there.
    """

    devices: int
    plan: PlanRecord | None
    marginal_return: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; the plan with the keys of the public contract."""
        plan = self.plan.to_json() if self.plan else None
        return {"devices": self.devices, "plan": plan, "marginal_return": self.marginal_return, "reason": self.reason}


def scale_text(sizes: Sequence[Size]) -> str:
    """A line a size, and below it what the plan is."""
    head = f"{'devices':>7}{'step':>11}{'samples/s':>12}{'tokens/s/dev.':>15}{'MFU':>8}{'peak':>12}{'return':>9}"
    notes = [
        "",
        "return: what a device added since the size before brings, as a share of what",
        "a device brings at the first size.",
    ]
    return "\n".join([head, *(line for size in sizes for line in _lines(size)), *notes])


def _lines(size: Size) -> Iterator[str]:
    plan = size.plan
    if plan is None:
        yield from wrap(size.reason, f"{size.devices:>7}  ", " " * 9)
        return
    tokens = "-" if plan.tokens_per_s_per_device is None else f"{plan.tokens_per_s_per_device:,.0f}"
    returned = "" if size.marginal_return is None else share_text(size.marginal_return)
    yield (
        f"{size.devices:>7}{seconds_text(plan.step_time_s):>11}{plan.request.global_batch / plan.step_time_s:>12,.4g}"
        f"{tokens:>15}{'-' if plan.mfu is None else share_text(plan.mfu):>8}{gib_text(plan.peak_memory_bytes):>12}"
        f"{returned:>9}"
    )
    idle = size.devices - len(plan.placement)
    words = f"{plan.pp_degree} stages ({plan.schedule}), " if plan.pp_degree > 1 else ""
    words += f"{plan.num_microbatches} microbatch{'es' * (plan.num_microbatches > 1)}, {most_common(plan)}" + (
        f"; {idle} idle" if idle else ""
    )
    yield from wrap(words, " " * 9, " " * 9)
