"""Priced strategies, which the stack problem chooses from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.layer import LayerFigures
from autopar.engine.stack_problem import Choices, Run, StackProblem
from autopar.graph import Layout
from autopar.plan import DtypePolicy, LayerStrategy


@dataclass(frozen=True)
class Budget:
    """What holds for every scenario: byte limit (None: none) and bytes held besides the layers, dtypes, optimizer."""

    limit_bytes: int | None
    policy: DtypePolicy
    optimizer: str


@dataclass(frozen=True)
class Column:
    """A priced strategy of one run; `tie` numbers the storage of tied parameters and their ZeRO level, -1 for none."""

    strategy: LayerStrategy
    figures: LayerFigures
    tie: int


def choices_of(columns: Sequence[Column], states: Mapping[Layout, int]) -> Choices:
    """Columns of one run as choices of the stack problem; `states` number the layouts at cuts."""
    figures = [c.figures for c in columns]
    memory = [f.memory for f in figures]
    return Choices(
        entry=_ints(states[c.strategy.entry] for c in columns),
        exit=_ints(states[c.strategy.exit] for c in columns),
        micro_s=np.array([f.micro_s for f in figures]),
        step_s=np.array([f.step_s for f in figures]),
        static_bytes=_ints(m.parameters + m.optimizer + m.inputs for m in memory),
        grad_bytes=_ints(m.gradients for m in memory),
        saved_bytes=_ints(m.saved for m in memory),
        transient_bytes=_ints(m.transient for m in memory),
        step_bytes=_ints(m.step for m in memory),
        ties=_ints(c.tie for c in columns)[:, None],
        update_bytes=_ints(m.update for m in memory),
        reduced_bytes=_ints(m.reduced for m in memory),
        put_off_bytes=_ints(m.put_off for m in memory),
        late_bytes=_ints(m.late for m in memory),
        parting_bytes=_ints(m.parting for m in memory),
    )


def free_problem(runs: tuple[Run, ...], num_microbatches: int, limit_bytes: int | None = None) -> StackProblem:
    """The stack problem of runs whose ends may be in any state that their choices know."""
    entries, exits = np.unique(runs[0].choices.entry), np.unique(runs[-1].choices.exit)
    return StackProblem(runs, tuple(entries.tolist()), tuple(exits.tolist()), num_microbatches, limit_bytes=limit_bytes)


def _ints(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)
