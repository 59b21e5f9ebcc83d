"""Dynamic programmes of two published planners, over equal blocks: which choice each takes, where stages are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

STEP_BYTES = 1_000_000
"""Memory counts in steps of 1 MB."""


@dataclass(frozen=True)
class Choice:
    """What a block costs one device in one uniform plan: seconds a microbatch and a step, bytes whatever is in flight
    and of each microbatch in flight. `front_s`, `back_s`: seconds a microbatch of the layers before and behind all
    blocks; `rest_bytes`: what the device holds beside blocks."""

    micro_s: float
    step_s: float
    held_bytes: int
    saved_bytes: int
    front_s: float
    back_s: float
    rest_bytes: int


@dataclass(frozen=True)
class Stages:
    """Blocks of a pipeline of `stages` with `count` microbatches, under a byte limit for blocks alone."""

    choices: Sequence[Choice]
    blocks: int
    stages: int
    count: int
    limit_bytes: int

    def picks(self, stage: int, blocks: int) -> list[int] | None:
        """The choices of so many blocks of a stage that take least time within memory; None where none fit."""
        seconds, chosen = self._tables[min(self.count, self.stages - stage)]
        room, found = len(seconds[0]) - 1, []
        if not np.isfinite(seconds[blocks][room]):
            return None
        for number in range(blocks, 0, -1):
            pick = int(chosen[number][room])
            found.append(pick)
            room -= self._weights(min(self.count, self.stages - stage))[pick]
        return sorted(found)

    def cuts(self) -> list[int] | None:
        """Cuts under which the stages' seconds a microbatch and (count - 1) times the longest of them are least."""
        table = np.array([[self._span_s(s, n) for n in range(self.blocks + 1)] for s in range(self.stages)])
        best: tuple[float, list[int] | None] = (np.inf, None)
        for longest in np.unique(table[np.isfinite(table)]):
            if (self.count - 1) * longest >= best[0]:
                break
            found = self._within(np.where(table <= longest, table, np.inf))
            if found is not None:
                total = found[0] + (self.count - 1) * longest
                best = min(best, (total, found[1]), key=lambda pair: pair[0])
        return best[1]

    def _span_s(self, stage: int, blocks: int) -> float:
        picks = self.picks(stage, blocks) if blocks else None
        if picks is None:
            return np.inf
        ends = [c.front_s for c in self.choices] if stage == 0 else [0.0]
        if stage == self.stages - 1:
            ends = [a + c.back_s for a, c in zip(ends * (len(self.choices) // len(ends)), self.choices, strict=True)]
        return sum(self.choices[p].micro_s for p in picks) + min(ends)

    def _within(self, table: NDArray[np.float64]) -> tuple[float, list[int]] | None:
        """The least sum of spans, and its cuts."""
        reached = np.full(self.blocks + 1, np.inf)
        reached[0] = 0.0
        came: list[NDArray[np.intp]] = []
        for stage in range(self.stages):
            ways = np.full((self.blocks + 1, self.blocks + 1), np.inf)
            for end in range(self.blocks + 1):
                ways[end, : end + 1] = reached[: end + 1] + table[stage, end::-1][: end + 1]
            came.append(ways.argmin(axis=1))
            reached = ways.min(axis=1)
        if not np.isfinite(reached[-1]):
            return None
        cuts = [self.blocks]
        for before in reversed(came):
            cuts.append(int(before[cuts[-1]]))
        return float(reached[-1]), cuts[::-1]

    def _weights(self, in_flight: int) -> list[int]:
        return [-(-(c.held_bytes + in_flight * c.saved_bytes) // STEP_BYTES) for c in self.choices]

    @cached_property
    def _tables(self) -> dict[int, tuple[list[NDArray[np.float64]], list[NDArray[np.intp]]]]:
        """By microbatches in flight: least seconds of 0, 1, ... blocks within steps of memory, and the last picks."""
        room = max(0, self.limit_bytes // STEP_BYTES)
        found = {}
        for in_flight in {min(self.count, self.stages - s) for s in range(self.stages)}:
            weights = self._weights(in_flight)
            seconds, chosen = [np.zeros(room + 1)], [np.zeros(room + 1, dtype=np.intp)]
            for _ in range(self.blocks):
                ways = np.full((len(weights), room + 1), np.inf)
                for c, weight in enumerate(weights):
                    if weight <= room:
                        one_s = self.count * self.choices[c].micro_s + self.choices[c].step_s
                        ways[c, weight:] = seconds[-1][: room + 1 - weight] + one_s
                chosen.append(ways.argmin(axis=0))
                seconds.append(ways.min(axis=0))
            found[in_flight] = seconds, chosen
        return found


def even(blocks: int, stages: int) -> list[int]:
    """Cuts into stages as even as can be."""
    return [blocks * s // stages for s in range(stages + 1)]


def sizes(cuts: Sequence[int]) -> list[int]:
    """Blocks of each stage."""
    return [b - a for a, b in pairwise(cuts)]
