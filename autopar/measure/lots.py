"""Timing many keys: a few at a time, so that what is done is kept when the rest is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from autopar.graph import CollectiveKey, OpKey
from autopar.measure.profile import Timing

LOT = 16
"""Keys timed before their timings are handed over."""

TIMED_S, AROUND_S = 0.02, 0.02
"""Seconds that a quick key is timed for, and that making its operands takes."""

REPEATS = 5
"""Least runs of a slow key, warming up included."""

Key = TypeVar("Key", OpKey, CollectiveKey)


def in_lots(
    time: Callable[[Sequence[Key]], Mapping[Key, Timing]], keys: Sequence[Key], what: str
) -> Iterator[Mapping[Key, Timing]]:
    """Timings of `keys` lot by lot, with a bar on standard error once it takes longer than a second."""
    from tqdm import tqdm

    with tqdm(total=len(keys), desc=what, unit="key", file=sys.stderr, leave=False, delay=1.0) as bar:
        for lot in _lots(keys):
            timings = time(lot)
            bar.update(len(lot))
            yield timings


def expected_s(predicted_s: Sequence[float]) -> float:
    """About how long it takes to time keys that are predicted to run for so long, forward and backward together."""
    return sum(AROUND_S + max(TIMED_S, REPEATS * seconds) for seconds in predicted_s)


def _lots(keys: Sequence[Key]) -> Iterator[list[Key]]:
    for start in range(0, len(keys), LOT):
        yield list(keys[start : start + LOT])
