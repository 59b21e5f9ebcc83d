"""What a piece of a step asks of a device, as keys, and the one function that turns keys into seconds.

Everything that has a price (a call, a layout change, a gradient synchronisation, an optimizer step) is first a
`Demand`. The search prices thousands of them in one go, `price` those of one layer: the seconds are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from autopar.cost.pricer import Pricer, Seconds, Source
from autopar.graph import CollectiveKey, OpKey


@dataclass(frozen=True, slots=True)
class Demand:
    """Local ops and collectives of one piece of work.

    `ops` run in the forward pass and are differentiated in the backward pass; `forward_ops` and `backward_ops` are
    plain local work (copies) done in that pass only.
    """

    ops: tuple[OpKey, ...] = ()
    forward_ops: tuple[OpKey, ...] = ()
    backward_ops: tuple[OpKey, ...] = ()
    forward_collectives: tuple[CollectiveKey, ...] = ()
    backward_collectives: tuple[CollectiveKey, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Demand]) -> Demand:
        """All that `parts` ask for."""
        return cls(*(tuple(key for p in parts for key in getattr(p, f.name)) for f in fields(cls)))

    @property
    def forward_alone(self) -> Demand:
        """What the forward pass asks for."""
        return Demand(forward_ops=(*self.ops, *self.forward_ops), forward_collectives=self.forward_collectives)


@dataclass(frozen=True)
class DemandTimes:
    """Seconds of demands, each array of shape (demands,): compute and communication apart, and all by source."""

    forward_compute_s: Seconds
    backward_compute_s: Seconds
    forward_communication_s: Seconds
    backward_communication_s: Seconds
    by_source: dict[Source, Seconds]

    @property
    def forward_s(self) -> Seconds:
        """Seconds of the forward pass with nothing overlapped."""
        return self.forward_compute_s + self.forward_communication_s

    @property
    def backward_s(self) -> Seconds:
        """Seconds of the backward pass with nothing overlapped."""
        return self.backward_compute_s + self.backward_communication_s


Key = TypeVar("Key", OpKey, CollectiveKey)


def price_demands(demands: Sequence[Demand], pricer: Pricer) -> DemandTimes:
    """Seconds of each demand; every distinct key is asked of `pricer` once."""
    ops = list(dict.fromkeys(key for d in demands for key in (*d.ops, *d.forward_ops, *d.backward_ops)))
    moves = list(dict.fromkeys(key for d in demands for key in (*d.forward_collectives, *d.backward_collectives)))
    timed, moved = pricer.ops(ops), pricer.collectives(moves)
    forward = _Table(ops, timed.forward_s, timed.sources)
    backward = _Table(ops, timed.backward_s, timed.sources)
    collectives = _Table(moves, moved.seconds, moved.sources)
    by_source: dict[Source, Seconds] = {}
    return DemandTimes(
        forward.total([(*d.ops, *d.forward_ops) for d in demands], by_source),
        backward.total([d.ops for d in demands], by_source)
        + forward.total([d.backward_ops for d in demands], by_source),
        collectives.total([d.forward_collectives for d in demands], by_source),
        collectives.total([d.backward_collectives for d in demands], by_source),
        by_source,
    )


class _Table(Generic[Key]):
    """Seconds and sources by key."""

    def __init__(self, keys: Sequence[Key], seconds: Seconds, sources: Sequence[Source]) -> None:
        self.index: dict[Key, int] = {key: i for i, key in enumerate(keys)}
        self.seconds, self.names = seconds, sorted({*sources})
        numbers = {name: i for i, name in enumerate(self.names)}
        self.source = np.array([numbers[source] for source in sources], dtype=np.intp)

    def total(self, wanted: Sequence[Sequence[Key]], by_source: dict[Source, Seconds]) -> Seconds:
        """Sum of each sequence of keys, shape (wanted,); `by_source` grows by the same sums, split by source."""
        owner = np.repeat(np.arange(len(wanted)), [len(keys) for keys in wanted])
        which = np.array([self.index[key] for keys in wanted for key in keys], dtype=np.intp)
        seconds, source = self.seconds[which], self.source[which]
        result = np.zeros(len(wanted))
        for number in np.unique(source).tolist():
            mine, name = source == number, self.names[number]
            share = np.bincount(owner[mine], seconds[mine], len(wanted)).astype(np.float64)
            by_source[name] = by_source.get(name, 0.0) + share
            result += share
        return result
