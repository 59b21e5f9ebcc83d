"""The stack problem: one choice for every layer of a chain of equal runs, fastest under a byte limit; its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.engine.errors import ProblemError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
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


@dataclass(frozen=True, eq=False)
class Choices:
    """The C ways to run one layer, a column (C,) for each figure.

    `entry`, `exit`: states (small ints >= 0) in front of and behind the layer. `micro_s`: seconds a microbatch,
    `step_s`: once a step. `static_bytes`: always held (parameters, optimizer states); `grad_bytes`: gradients until
    they are reduced, `reduced_bytes` (as many unless given) from then on; `saved_bytes`: kept for the backward of one
    microbatch; `transient_bytes`: the layer's largest temporary; `step_bytes`: its temporaries as gradients are
    reduced, of which only the largest layer's exist at once; `update_bytes`: those of the optimizer, of all layers at
    once; `put_off_bytes` (none unless given): what waits to become a microbatch's gradients of weights, `late_bytes`
    (none unless given) of `grad_bytes`; `parting_bytes` (transient and put off unless given): the largest temporary
    where these wait, what waits of the layer itself included. `ties` (C, T): the value chosen for tie t, -1 where the
    choice has none; all layers that have a value for a tie must have the same.
    Raises ProblemError on columns that don't fit.
    """

    entry: Ints
    exit: Ints
    micro_s: Floats
    step_s: Floats
    static_bytes: Ints
    grad_bytes: Ints
    saved_bytes: Ints
    transient_bytes: Ints
    step_bytes: Ints
    ties: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    update_bytes: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    reduced_bytes: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    put_off_bytes: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    late_bytes: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    parting_bytes: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if not self.ties.size:
            object.__setattr__(self, "ties", np.empty((len(self.entry), 0), dtype=np.int64))
        for name in ("update_bytes", "put_off_bytes", "late_bytes"):
            if not getattr(self, name).size:
                object.__setattr__(self, name, np.zeros(len(self.entry), dtype=np.int64))
        if not self.reduced_bytes.size:
            object.__setattr__(self, "reduced_bytes", self.grad_bytes)
        if not self.parting_bytes.size:
            object.__setattr__(self, "parting_bytes", self.transient_bytes + self.put_off_bytes)
        for column in fields(self):
            values = getattr(self, column.name)
            if len(values) != len(self.entry):
                raise ProblemError(
                    f"{column.name} has {len(values)} rows, entry has {len(self.entry)}; give one for each choice."
                )
            if not np.isfinite(values).all() or (column.name != "ties" and (values < 0).any()):
                raise ProblemError(f"{column.name} holds {values.min()}; numbers must be finite and not negative.")

    def __len__(self) -> int:
        return len(self.entry)

    def held(self, times: Held) -> Ints:
        """(C,) bytes that one layer of each choice holds."""
        found = self.static_bytes + self.grad_bytes * times.gradients + self.saved_bytes * times.saved
        found = found + self.reduced_bytes * times.reduced + self.update_bytes * times.update
        found = found + self.put_off_bytes * times.put_off if times.put_off else found
        found = found - self.late_bytes * times.unmade if times.unmade else found
        return found + times.turn.more(self._changing) if times.turn else found

    def extra(self, moment: Moment, times: Held) -> Ints:
        """(C,) bytes that one layer alone holds on top while its run is at a moment."""
        if moment.backward is None:
            return self.step_bytes if moment == REDUCING else np.zeros_like(self.step_bytes)
        return times.turn.on_top(self._changing) if times.turn else self.transient_bytes

    @property
    def _changing(self) -> Bytes[Ints]:
        return Bytes(
            self.saved_bytes, self.grad_bytes, self.late_bytes, self.transient_bytes, self.put_off_bytes,
            self.parting_bytes,
        )  # fmt: skip

    def take(self, rows: Ints) -> Choices:
        """The choices of the given rows, in that order."""
        return Choices(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


@dataclass(frozen=True, eq=False)
class Run:
    """`count` (at least 1) equal consecutive layers with the same choices, a part of chunk `chunk`."""

    count: int
    choices: Choices
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class StackProblem:
    """A chain of runs; `entry_states` and `exit_states` are allowed at its ends.

    Minimise fixed_s + num_microbatches * sum(micro_s) + sum(step_s), the peak (docs/design.md, "Memory", plus
    `fixed_bytes`) being at most `limit_bytes` (None: no limit). `backwards`: states of things in which a backward pass
    runs; unless given there is one chunk, with one microbatch at a time. Raises ProblemError on a run without layers.
    """

    runs: tuple[Run, ...]
    entry_states: tuple[int, ...]
    exit_states: tuple[int, ...]
    num_microbatches: int = 1
    fixed_s: float = 0.0
    fixed_bytes: int = 0
    limit_bytes: int | None = None
    backwards: tuple[Backward, ...] = ()

    def __post_init__(self) -> None:
        if not self.runs or any(run.count < 1 for run in self.runs):
            counts = [run.count for run in self.runs]
            raise ProblemError(f"run counts are {counts}; give at least one run, each of 1 layer or more.")
        if len({run.choices.ties.shape[1] for run in self.runs}) > 1:
            raise ProblemError("runs have different numbers of tie columns; give all of them one for every tie.")
        if self.num_microbatches < 1:
            raise ProblemError(f"num_microbatches is {self.num_microbatches}; 1 or more is allowed.")

    def seconds(self, run: int) -> Floats:
        """(C,) seconds a step of each choice of the run."""
        choices = self.runs[run].choices
        return self.num_microbatches * choices.micro_s + choices.step_s

    @property
    def states(self) -> int:
        """One more than the largest state of any choice."""
        return 1 + max(int(side.max(initial=0)) for run in self.runs for side in (run.choices.entry, run.choices.exit))

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """When bytes are added up."""
        alone = (one_at_a_time(self.num_microbatches),)
        return moments_of(self.backwards or alone, [run.chunk for run in self.runs])

    def held_bytes(self) -> list[list[Ints]]:
        """For each moment and each run, the bytes (C,) that one layer of each choice holds then."""
        return [
            [run.choices.held(held_at(moment, r, run.chunk)) for r, run in enumerate(self.runs)]
            for moment in self.moments
        ]

    def base_bytes(self) -> list[int]:
        """For each moment the bytes held whatever is chosen."""
        return [self.fixed_bytes + (m.backward.held_bytes if m.backward else 0) for m in self.moments]

    def extra_bytes(self) -> list[dict[int, Ints]]:
        """For each moment, by run, the bytes (C,) of which the largest is held on top."""
        found = []
        for moment in self.moments:
            runs = range(len(self.runs)) if moment.backward is None else (moment.run,)
            times = {r: held_at(moment, r, self.runs[r].chunk) for r in runs}
            found.append({r: self.runs[r].choices.extra(moment, held) for r, held in times.items()})
        return found


def one_at_a_time(num_microbatches: int) -> Backward:
    """One chunk, one microbatch in flight: after the first microbatch all gradients exist."""
    return Backward(0, (1,), (num_microbatches > 1,))


@dataclass(frozen=True, eq=False)
class Flow:
    """`counts[r]` (C,): how many layers of run r take each choice; `starts[r]`: the state in front of run r."""

    counts: tuple[Ints, ...]
    starts: tuple[int, ...]


def objective_s(problem: StackProblem, flow: Flow) -> float:
    """Seconds a step."""
    return problem.fixed_s + sum(float(problem.seconds(r) @ n) for r, n in enumerate(flow.counts))


def moment_bytes(problem: StackProblem, flow: Flow) -> list[int]:
    """Bytes held at each moment of the problem."""
    used = [n > 0 for n in flow.counts]
    return [
        base + max(int(of[used[r]].max()) for r, of in extra.items())
        + sum(int(b @ n) for b, n in zip(held, flow.counts, strict=True))
        for base, extra, held in zip(problem.base_bytes(), problem.extra_bytes(), problem.held_bytes(), strict=True)
    ]  # fmt: skip


def ties_agree(problem: StackProblem, flow: Flow) -> bool:
    """Whether all used choices have one value for each tie."""
    values = np.concatenate([run.choices.ties[n > 0] for run, n in zip(problem.runs, flow.counts, strict=True)])
    return all(len(np.unique(column[column >= 0])) <= 1 for column in values.T)


class Status(Enum):
    """How far a search came.

    OPTIMAL: proven; FEASIBLE: an answer, but time ran out before the proof; INFEASIBLE: proven that there is none;
    TIME_LIMIT: time ran out before any answer; CUT_OFF: proven that there is none better than the cutoff given.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"
    CUT_OFF = "cut off"


@dataclass(frozen=True)
class StackSolution:
    """Answer of the stack problem.

    `walks[r]` lists (choice, number of consecutive layers) of run r in order; empty without an answer.
    `lower_bound_s` is proven. `peak_bytes` is that of the answer; when infeasible, the smallest that can be reached,
    or None where it wasn't asked for or states or ties already forbid every stack. `binding` numbers the moment of that
    peak.
    """

    status: Status
    objective_s: float
    lower_bound_s: float
    walks: tuple[tuple[tuple[int, int], ...], ...] = ()
    peak_bytes: int | None = None
    binding: int | None = None
