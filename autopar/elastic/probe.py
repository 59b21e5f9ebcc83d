"""How long this rank takes for a piece of its plan's work, without waiting for any other."""

from __future__ import annotations

import time

import torch

from autopar.cost.work import work
from autopar.graph import OpKey
from autopar.measure.keys import decode_key
from autopar.measure.ops import time_op
from autopar.plan import PlanRecord

OPS = 3
"""Operators of a plan that are timed: those of most FLOPs."""
BUDGET_S = 0.1
"""Seconds that each of them is timed for."""
WIDTH = 512
"""Of the product that stands for plans without any that can be timed."""


def heaviest(record: PlanRecord) -> tuple[OpKey, ...]:
    """The operators with most FLOPs of those that the plan was priced by."""
    keys = [key for text in record.costs.keys if isinstance(key := decode_key(text), OpKey)]
    flops = {key: work(key).forward.flops for key in keys}
    return tuple(sorted((key for key in keys if flops[key] > 0), key=lambda key: -flops[key])[:OPS])


def probe(record: PlanRecord, device: torch.device) -> float:
    """Seconds that this rank takes for one run of each of the plan's heaviest operators, forward and backward."""
    timings = [time_op(key, device, BUDGET_S) for key in heaviest(record)]
    seconds = sum(t.forward_s + t.backward_s for t in timings if not t.failed)
    return seconds or _product(device)


def _product(device: torch.device) -> float:
    """Seconds of a product of two square matrices."""
    factor = torch.ones(WIDTH, WIDTH, device=device)
    began, count, product = time.perf_counter(), 0, factor
    while time.perf_counter() - began < BUDGET_S:
        product = product @ factor * (1 / WIDTH)
        count += 1
        float(product[0, 0])  # waits for an accelerator
    return (time.perf_counter() - began) / count
