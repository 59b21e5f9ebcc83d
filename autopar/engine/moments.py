"""Moments of a step at which bytes are added up, and how often a layer's are held then (docs/design.md, "Memory")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Amount = TypeVar("Amount", int, Ints)


@dataclass(frozen=True)
class Backward:
    """A state of things in which chunk `chunk` of the runs runs the backward pass of a microbatch.

    `saved[c]`: of how many microbatches chunk c holds what it saved, the running one included. `grown[c]`: whether its
    gradients exist from an earlier microbatch; if not they come into being as this one passes. `held_bytes`: besides.
    Of a pass in halves the first (`half` 1) puts gradients of weights off and the second (2) makes them. `put_off[c]`
    counts the other microbatches of which what they are made from still waits in chunk c (none unless given), and
    `begun[c]` says whether its other gradients exist (as `grown` unless given).
    """

    chunk: int
    saved: tuple[int, ...]
    grown: tuple[bool, ...]
    held_bytes: int = 0
    half: int = 0
    put_off: tuple[int, ...] = ()
    begun: tuple[bool, ...] = ()


class Moment(NamedTuple):
    """When bytes are added up: run `run` (its largest transient on top) in a backward pass; or, `backward` None, as
    gradients are reduced (run -2, the largest temporary on top) and as the optimizer updates (run -1)."""

    backward: Backward | None
    run: int


REDUCING, UPDATING = Moment(None, -2), Moment(None, -1)


class Bytes(NamedTuple, Generic[Amount]):
    """Of a layer's bytes, or those of each of its choices, what changes as it runs backward (see `Choices`)."""

    saved: Amount
    gradients: Amount
    late: Amount
    transient: Amount
    put_off: Amount
    parting: Amount


class Turn(NamedTuple):
    """A layer's bytes of one microbatch turn into others as a pass, or half `half` of it, goes through its run.

    Saved bytes turn into gradients that don't exist yet (`late`: those of weights that can be put off; `early`: others)
    and, in the first half, into what is put off, which the second half turns into gradients.
    """

    half: int
    early: bool
    late: bool

    def made(self, of: Bytes[Amount]) -> Amount:
        """Gradients that come into being."""
        return (of.gradients - of.late) * self.early + of.late * self.late

    def before(self, of: Bytes[Amount]) -> Amount:
        """What turns."""
        return of.put_off if self.half == 2 else of.saved

    def more(self, of: Bytes[Amount]) -> Amount:
        """What turns or what it turns into, whichever is more."""
        found: Amount = np.maximum(self.before(of), self.made(of) + of.put_off * (self.half == 1))
        return found

    def on_top(self, of: Bytes[Amount]) -> Amount:
        """What the layer holds beyond that while it runs: both, and its temporaries."""
        temporary = (of.transient, of.parting, of.transient * 0)[self.half]
        return self.before(of) + self.made(of) + temporary - self.more(of)


class Held(NamedTuple):
    """How many times a layer's bytes are held at a moment; `late` gradients, a part of all, are missing `unmade` times.

    `turn`: besides, what one microbatch's bytes turn into.
    """

    saved: int
    gradients: int
    reduced: int = 0
    update: int = 0
    put_off: int = 0
    unmade: int = 0
    turn: Turn | None = None


def moments_of(backwards: Sequence[Backward], chunks: Sequence[int]) -> tuple[Moment, ...]:
    """All moments of a step, the reduction and the update last; `chunks[r]` is the chunk of run r."""
    runs = [Moment(b, r) for b in backwards for r, chunk in enumerate(chunks) if chunk == b.chunk]
    return (*runs, REDUCING, UPDATING)


def held_at(moment: Moment, run: int, chunk: int) -> Held:
    """What a layer of run number `run` in `chunk` holds beside its static bytes (docs/design.md, "Memory")."""
    backward = moment.backward
    if backward is None:
        return Held(0, 1) if moment == REDUCING else Held(0, 0, reduced=1, update=1)
    saved, grown = backward.saved[chunk], backward.grown[chunk]
    begun = grown or (bool(backward.begun) and backward.begun[chunk])
    late = backward.put_off[chunk] if backward.put_off else 0
    half = backward.half
    here = chunk == backward.chunk
    if here and half == 2:
        if run < moment.run:
            return Held(saved, 1, put_off=late)
        waits, turn = (1, None) if run > moment.run else (0, Turn(2, early=False, late=True))
        return Held(saved, 1, put_off=late + waits, unmade=1, turn=turn)
    if here and run > moment.run:
        return Held(saved - 1, 1, put_off=late + half, unmade=half * (not grown))
    if not here or run < moment.run or (grown and not half):
        return Held(saved, int(begun), put_off=late, unmade=begun - grown)
    turn = Turn(half, early=not begun, late=not (grown or half))
    return Held(saved - 1, int(begun), put_off=late, unmade=begun - grown, turn=turn)


def one_at_a_time(num_microbatches: int) -> Backward:
    """One chunk, one microbatch in flight: after the first microbatch all gradients exist."""
    return Backward(0, (1,), (num_microbatches > 1,))
