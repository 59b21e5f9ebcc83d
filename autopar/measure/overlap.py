"""Timing of compute and an all-reduce that run at once, as the two kinds of keys in `hiding.py` say."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
import torch.distributed as dist

from autopar.graph import CollectiveKey
from autopar.measure.hiding import HIDDEN
from autopar.measure.ops import clock_for
from autopar.measure.profile import Sample, Timing
from autopar.shard.torch_private import group_named

TWICE = 2.0
"""How much longer the longer of the two takes."""

SIDE = 256
"""The side of the square products that compute consists of."""

REPEATS = 5


def time_both(key: CollectiveKey, group: str, buffer: torch.Tensor) -> Timing:
    """Time a key of one of the two kinds; `buffer` is what is reduced. Every rank of the job calls this at once."""
    device, factor = buffer.device, torch.ones(SIDE, SIDE, device=buffer.device)
    members = group_named(group)

    def compute(products: int) -> None:
        for _ in range(products):
            _product(factor)

    def reduced(products: int) -> None:
        """An all-reduce that begins before the products, and is waited for behind them."""
        sent = dist.all_reduce(buffer, group=members, async_op=True)
        compute(products)
        if sent is not None:
            sent.wait()

    def once(work: Callable[[int], None], products: int) -> float:
        dist.barrier()
        clock = clock_for(device)
        work(products)
        return clock()

    sent_s, product_s = (min(once(*run) for _ in range(3)) for run in ((reduced, 0), (compute, 1)))
    wanted_s = sent_s * (TWICE if key.kind == HIDDEN else 1 / TWICE)
    agreed = [max(1, ceil(wanted_s / max(product_s, 1e-7)))]
    dist.broadcast_object_list(agreed, 0, device=device)
    count = agreed[0]
    added, alone = [], []
    for _ in range(REPEATS):
        both, sent, computed = once(reduced, count), once(reduced, 0), once(compute, count)
        longer, shorter = (computed, sent) if key.kind == HIDDEN else (sent, computed)
        added.append(max(0.0, both - longer))
        alone.append(shorter)
    return Timing(Sample(tuple(added)), Sample(tuple(alone)))


def _product(factor: torch.Tensor) -> torch.Tensor:
    return factor @ factor
