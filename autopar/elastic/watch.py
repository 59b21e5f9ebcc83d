"""When a step's seconds are off what is usual for good: numbers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

WINDOW = 50
"""Steps that the usual seconds are the median of."""
SPREADS = 6.0
"""Times the usual spread (median distance from the median) that a step may be off without being counted."""


class Watch:
    """Tells a lasting change of step times from noise.

    A step is off where it takes more than 1 + `tolerance` times the usual seconds, or less than their part, and differs
    by more than `SPREADS` times what usual steps do. Usual is `expected_s` (the plan's prediction) until `patience`
    steps were not off, then their median. After `patience` steps in a row that are off, all on one side, `see` says so;
    `settle` takes these for usual from then on.
    """

    def __init__(self, expected_s: float, patience: int = 5, tolerance: float = 0.25) -> None:
        self._expected_s, self._patience, self._tolerance = expected_s, patience, tolerance
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._off: list[float] = []

    @property
    def usual_s(self) -> float:
        """Seconds that a step takes when nothing is wrong."""
        return median(self._usual) if len(self._usual) >= self._patience else self._expected_s

    @property
    def now_s(self) -> float:
        """Seconds that steps take now: of those that are off, if there are any."""
        return median(self._off) if self._off else self.usual_s

    def see(self, step_s: float) -> bool:
        """Take a step into account; whether `patience` steps in a row were off."""
        side = self._side(step_s)
        if not side:
            self._off.clear()
            self._usual.append(step_s)
            return False
        if self._off and self._side(self._off[-1]) != side:
            self._off.clear()
        self._off.append(step_s)
        return len(self._off) >= self._patience

    def settle(self) -> None:
        """What is now is usual."""
        self._usual = deque(self._off, maxlen=WINDOW)
        self._off.clear()

    def _side(self, step_s: float) -> int:
        """1 where a step took too long, -1 where it was too quick, 0 where it was neither."""
        usual_s = self.usual_s
        spread_s = median([abs(s - usual_s) for s in self._usual]) if self._usual else 0.0
        ratio = 1 + max(self._tolerance, SPREADS * spread_s / usual_s)
        return (step_s > usual_s * ratio) - (step_s * ratio < usual_s)


def speeds(probe_s: Sequence[float], kinds: Sequence[object], tolerance: float = 0.25) -> tuple[float, ...]:
    """The pace of each device beside those of its kind, 1 for all that are no more than `tolerance` slower.

    `probe_s`: seconds that the same work took each. The pace of a kind is the lower median of its devices': where half
    of them are slow, the others are what is usual.
    """
    usual_s = {kind: median_low([s for s, k in zip(probe_s, kinds, strict=True) if k == kind]) for kind in {*kinds}}
    found = [usual_s[kind] / s for s, kind in zip(probe_s, kinds, strict=True)]
    return tuple(round(pace, 2) if pace * (1 + tolerance) < 1 else 1.0 for pace in found)


def gain_s(now_s: float, old_s: float, new_s: float, remaining: int) -> float:
    """Seconds that `remaining` steps of `now_s` would take less under a plan of `new_s` than under one of `old_s`.

    Both are predictions; what they have in common of errors is in what was measured, too.
    """
    return remaining * now_s * (1 - new_s / old_s)


def most_gained_s(now_s: float, paces: Sequence[float], remaining: int) -> float:
    """Seconds that any plan could save of steps that wait for the slowest: by work dealt out by pace."""
    return remaining * now_s * (1 - min(paces) * len(paces) / sum(paces))
