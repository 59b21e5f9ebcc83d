"""The stack problem: one choice for every layer of a chain of equal runs, fastest under a byte limit; its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.engine.errors import ProblemError
from autopar.engine.ledger import Ledger
from autopar.engine.moments import Backward, Bytes, Ints, Moment, moments_of, one_at_a_time

Floats: TypeAlias = NDArray[np.float64]


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

    @property
    def changing(self) -> Bytes[Ints]:
        """What of the bytes changes as a layer runs backward."""
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
    known: Ledger | None = field(default=None, repr=False)

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

    @cached_property
    def ledger(self) -> Ledger:
        """What choices hold at all moments, or at those that are known to count."""
        return self.known or Ledger.of(self)

    def only(self, rows: Sequence[Ints], ledger: Ledger) -> StackProblem:
        """The problem with some choices of each run, which hold what `ledger` says."""
        runs = (replace(run, choices=run.choices.take(own)) for run, own in zip(self.runs, rows, strict=True))
        return replace(self, runs=tuple(runs), known=ledger)


@dataclass(frozen=True, eq=False)
class Flow:
    """`counts[r]` (C,): how many layers of run r take each choice; `starts[r]`: the state in front of run r."""

    counts: tuple[Ints, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FlowResult:
    """`flow` is None without an answer; `bound` is proven (inf: there is none); `complete` unless time ran out."""

    flow: Flow | None
    bound: float
    complete: bool


def objective_s(problem: StackProblem, flow: Flow) -> float:
    """Seconds a step."""
    return problem.fixed_s + sum(float(problem.seconds(r) @ n) for r, n in enumerate(flow.counts))


def moment_bytes(problem: StackProblem, flow: Flow) -> list[int]:
    """Bytes held at each moment of the problem's ledger."""
    return [int(held) for held in problem.ledger.bytes(flow.counts)]


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
    or None where it wasn't asked for or states or ties already forbid every stack.
    """

    status: Status
    objective_s: float
    lower_bound_s: float
    walks: tuple[tuple[tuple[int, int], ...], ...] = ()
    peak_bytes: int | None = None
