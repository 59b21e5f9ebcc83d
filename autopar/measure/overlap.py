"""How far compute and an all-reduce slow each other down when both run at once.

Two kinds of a `CollectiveKey` stand for it. Under `HIDDEN` compute takes about twice as long as the all-reduce that
runs beside it, under `COVERED` half as long. Of either the forward sample has the seconds that the shorter of the two
adds to the longer one, the backward sample those that it takes alone: equal where nothing is gained by running them at
once, forward 0 where the shorter is hidden wholly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from statistics import fmean

import torch
import torch.distributed as dist

from autopar.graph import CollectiveKey
from autopar.measure.ops import clock_for
from autopar.measure.profile import Sample, Timing
from autopar.shard.torch_private import group_named

HIDDEN, COVERED = "all_reduce beside compute", "compute beside all_reduce"
TWICE = 2.0
"""How much longer the longer of the two takes."""

SIZE_BYTES, SIDE = 4 << 20, 256
"""Of the all-reduce, and the side of the square products that compute consists of."""

REPEATS = 5


def overlap_keys(ranks: int) -> list[CollectiveKey]:
    """What tells the overlap in a job of so many ranks."""
    return [CollectiveKey(kind, SIZE_BYTES, ranks, 1) for kind in (HIDDEN, COVERED)] if ranks > 1 else []


def hidden_share(timings: Mapping[CollectiveKey, Timing]) -> float | None:
    """The share of the shorter of two that run at once which the longer one hides, 0 to 1; None where none was timed.

    It is what `Device.overlap` means: communication c beside compute takes c - share * min(c, compute) more.
    """
    shares = [
        1 - timing.forward_s / timing.backward_s
        for key, timing in timings.items()
        if key.kind in (HIDDEN, COVERED) and not timing.failed and timing.backward_s > 0
    ]
    return min(1.0, max(0.0, fmean(shares))) if shares else None


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
