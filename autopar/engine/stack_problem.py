"""The stack problem: one choice for every layer of a chain of equal runs, fastest under a byte limit; its answer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.engine.errors import ProblemError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


class Held(NamedTuple):
    """How many times a layer's gradients, saved bytes and update bytes are held at a moment."""

    gradients: int
    saved: int
    update: int


def held_at(moment: int, run: int, runs: int, num_microbatches: int, in_flight: int) -> Held:
    """What a layer of run number `run` of `runs` holds at a moment beside its static bytes (docs/design.md, "Memory").

    Moments are the runs (their largest transients come on top), then the optimizer step (the largest of its temporaries
    on top). `in_flight` microbatches are under way at once.
    """
    if moment == runs:
        return Held(1, 0, 1)
    return Held(int(num_microbatches > 1 or run >= moment), in_flight - (run > moment), 0)


@dataclass(frozen=True, eq=False)
class Choices:
    """The C ways to run one layer, a column (C,) for each figure.

    `entry`, `exit`: states (small ints >= 0) in front of and behind the layer. `micro_s`: seconds a microbatch,
    `step_s`: once a step. `static_bytes`: always held (parameters, optimizer states); `grad_bytes`: gradients;
    `saved_bytes`: kept for the backward of one microbatch; `transient_bytes`: the layer's largest temporary;
    `step_bytes`: the layer's temporaries at the step, of which only the largest layer's exist at once; `update_bytes`:
    those of all layers at once. `ties` (C, T): the value chosen for tie t, -1 where the choice has
    none; all layers that have a value for a tie must have the same. Raises ProblemError on columns that don't fit.
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

    def __post_init__(self) -> None:
        if not self.ties.size:
            object.__setattr__(self, "ties", np.empty((len(self.entry), 0), dtype=np.int64))
        if not self.update_bytes.size:
            object.__setattr__(self, "update_bytes", np.zeros(len(self.entry), dtype=np.int64))
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

    def take(self, rows: Ints) -> Choices:
        """The choices of the given rows, in that order."""
        return Choices(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


@dataclass(frozen=True, eq=False)
class Run:
    """`count` (at least 1) equal consecutive layers with the same choices.

    `in_flight` microbatches are under way at once: when one runs, the others' saved bytes are held besides.
    """

    count: int
    choices: Choices
    in_flight: int = 1


@dataclass(frozen=True, eq=False)
class StackProblem:
    """A chain of runs; `entry_states` and `exit_states` are allowed at its ends.

    Minimise fixed_s + num_microbatches * sum(micro_s) + sum(step_s), the peak (docs/design.md, "Memory", plus
    `fixed_bytes`) being at most `limit_bytes` (None: no limit). Raises ProblemError on a run without layers.
    """

    runs: tuple[Run, ...]
    entry_states: tuple[int, ...]
    exit_states: tuple[int, ...]
    num_microbatches: int = 1
    fixed_s: float = 0.0
    fixed_bytes: int = 0
    limit_bytes: int | None = None

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

    def held_bytes(self) -> list[list[Ints]]:
        """For each moment (`held_at`) and each run, the bytes (C,) that one layer of each choice holds then."""
        last = len(self.runs)
        return [[self._held(run, r, moment) for r, run in enumerate(self.runs)] for moment in range(last + 1)]

    def _held(self, run: Run, number: int, moment: int) -> Ints:
        times, own = held_at(moment, number, len(self.runs), self.num_microbatches, run.in_flight), run.choices
        held = own.static_bytes + own.grad_bytes * times.gradients
        return held + own.saved_bytes * times.saved + own.update_bytes * times.update


@dataclass(frozen=True, eq=False)
class Flow:
    """`counts[r]` (C,): how many layers of run r take each choice; `starts[r]`: the state in front of run r."""

    counts: tuple[Ints, ...]
    starts: tuple[int, ...]


def objective_s(problem: StackProblem, flow: Flow) -> float:
    """Seconds a step."""
    return problem.fixed_s + sum(float(problem.seconds(r) @ n) for r, n in enumerate(flow.counts))


def moment_bytes(problem: StackProblem, flow: Flow) -> list[int]:
    """Bytes held at each moment: the runs in order, then the optimizer step."""
    used = [run.choices.take(np.flatnonzero(n)) for run, n in zip(problem.runs, flow.counts, strict=True)]
    extra = [int(choices.transient_bytes.max()) for choices in used]
    extra.append(max(int(choices.step_bytes.max()) for choices in used))
    return [
        problem.fixed_bytes + most + sum(int(b @ n) for b, n in zip(held, flow.counts, strict=True))
        for most, held in zip(extra, problem.held_bytes(), strict=True)
    ]


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
    or None where it wasn't asked for or states or ties already forbid every stack. `binding` names the moment of that
    peak: the index of a run, or `len(runs)` for the optimizer step.
    """

    status: Status
    objective_s: float
    lower_bound_s: float
    walks: tuple[tuple[tuple[int, int], ...], ...] = ()
    peak_bytes: int | None = None
    binding: int | None = None
