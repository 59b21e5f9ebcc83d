"""How far compute and an all-reduce slow each other down when both run at once: keys, and what their timings say.

Two kinds of a `CollectiveKey` stand for it. Under `HIDDEN` compute takes about twice as long as the all-reduce that
runs beside it, under `COVERED` half as long. Of either the forward sample has the seconds that the shorter of the two
adds to the longer one, the backward sample those that it takes alone: equal where nothing is gained by running them at
once, forward 0 where the shorter is hidden wholly.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from autopar.graph import CollectiveKey
from autopar.measure.profile import Timing

HIDDEN, COVERED = "all_reduce beside compute", "compute beside all_reduce"
SIZE_BYTES = 4 << 20
"""Of the all-reduce."""


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
