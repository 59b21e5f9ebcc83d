"""One scenario of the search: a mesh and a number of microbatches. Bound it by its tables, then solve it exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.engine.search import FURTHER
from autopar.engine.stack import StackOptions, solve_stack
from autopar.engine.stack_problem import Run, StackSolution, Status
from autopar.formulate.chains.columns import Budget, Column, free_problem
from autopar.formulate.chains.known import Known
from autopar.formulate.chains.siblings import FIRST, RUN, WHOLE
from autopar.formulate.chains.strategies import Chains
from autopar.formulate.layers.runs import LayerRun
from autopar.formulate.layers.tables import Setting

__all__ = ["Budget", "Column", "SolvedScenario", "StageScenario"]

BINDS = 0.01
"""A limit that costs no more than this share of the seconds isn't worth looking further."""
MORE_GAINS = 0.01
"""By what share more strategies hardly ever make a plan faster: where that wouldn't do there is no further look."""


@dataclass(frozen=True)
class SolvedScenario:
    """The stack solution of a scenario, with the columns its walks index (by run), on devices of `site`."""

    setting: Setting
    columns: tuple[tuple[Column, ...], ...]
    solution: StackSolution
    site: Cluster


@dataclass
class StageScenario:
    """One stage over a mesh with a number of microbatches, for a given model and budget."""

    runs: tuple[LayerRun, ...]
    setting: Setting
    pricer: Pricer
    budget: Budget
    known: Known
    _chains: Chains = field(init=False)

    def __post_init__(self) -> None:
        self._chains = Chains(self.runs, self.setting, self.pricer, self.budget, self.known)

    @property
    def chains(self) -> Chains:
        """The strategies that there are for its layers."""
        return self._chains

    @property
    def name(self) -> str:
        """Mesh and microbatches, for messages and as a stable order."""
        mesh = "x".join(str(s) for s in self.setting.sizes)
        count, batch = self.setting.num_microbatches, self.setting.batch
        return f"{mesh} devices{self._chains.inside}, {count} microbatches of {batch}"

    @property
    def least_bytes(self) -> float:
        """No plan of the scenario holds less (temporaries apart), once bounded."""
        return self._chains.least_bytes

    def bound_s(self) -> float:
        """Seconds that no plan of this scenario under the limit can beat; inf where none is legal or small enough."""
        return self._bound(WHOLE)

    def calls_bound_s(self) -> float:
        """A bound from the calls of layers alone, without changes of layout."""
        chains = self._chains
        return chains.bound_s if chains.possible else np.inf

    def first_bound_s(self) -> float:
        """A bound from seconds and from bytes each alone, of the longest run alone, at less cost."""
        return self._bound(FIRST)

    def run_bound_s(self) -> float:
        """A bound from the longest run alone."""
        return self._bound(RUN)

    def _bound(self, level: int) -> float:
        chains, limit = self._chains, self.budget.limit_bytes
        if not chains.possible:
            return np.inf
        chains.bound(level)
        return chains.bound_s if limit is None or self.least_bytes <= limit else np.inf

    def solve(self, cutoff_s: float = np.inf) -> SolvedScenario:
        """Price the strategies worth having, and choose for every layer; answers above `cutoff_s` may be left out."""
        if not self._chains.possible:
            return self._solved((), StackSolution(Status.INFEASIBLE, np.inf, np.inf))
        columns, limit = self._chains.columns(), self.budget.limit_bytes
        near = StackOptions(cutoff_s=cutoff_s * FURTHER)
        solution = self._solve_stack(columns, limit, near)
        promising = solution.objective_s < cutoff_s * (1 + MORE_GAINS) or cutoff_s == np.inf
        promising |= not solution.walks and not self._solve_stack(columns, limit, StackOptions()).walks
        if limit is not None and promising and self._binds(columns, solution, near):
            more = self._chains.columns(wide=True)
            columns = tuple(_joined(few, further) for few, further in zip(columns, more, strict=True))
            solution = self._solve_stack(columns, limit, StackOptions(cutoff_s=cutoff_s))
        return self._solved(columns, solution)

    def _binds(self, columns: tuple[tuple[Column, ...], ...], solution: StackSolution, options: StackOptions) -> bool:
        """Whether without the limit there would be a better answer, of those of interest."""
        free = self._solve_stack(columns, None, options)
        return bool(free.walks) and (not solution.walks or free.objective_s < solution.objective_s * (1 - BINDS))

    def _solved(self, columns: tuple[tuple[Column, ...], ...], solution: StackSolution) -> SolvedScenario:
        return SolvedScenario(self.setting, columns, solution, self.pricer.cluster)

    def families(self, cutoff_s: float) -> Iterator[SolvedScenario]:
        """The best below `cutoff_s` with one ZeRO level and recomputation in all layers that have such a strategy."""
        if not self._chains.possible:
            return
        columns = self._chains.columns()
        options = StackOptions(cutoff_s=cutoff_s)
        for zero, recompute in sorted({(c.strategy.zero, c.strategy.recompute) for run in columns for c in run}):
            mine = tuple(_of_family(run, zero, recompute) for run in columns)
            solution = self._solve_stack(mine, self.budget.limit_bytes, options)
            if solution.walks:
                yield self._solved(mine, solution)

    def enough_bytes(self) -> float:
        """A limit under which `solve` has an answer, near the least there is; inf where nothing is legal."""
        if not self._chains.possible:
            return np.inf
        columns = self._chains.columns(leanest=True)
        return self._solve_stack(columns, 1, StackOptions()).peak_bytes or np.inf

    def _solve_stack(
        self, columns: tuple[tuple[Column, ...], ...], limit_bytes: int | None, options: StackOptions
    ) -> StackSolution:
        runs = tuple(Run(run.count, self._chains.choices(c)) for run, c in zip(self.runs, columns, strict=True))
        return solve_stack(free_problem(runs, self.setting.num_microbatches, limit_bytes), options)


def _joined(few: tuple[Column, ...], further: tuple[Column, ...]) -> tuple[Column, ...]:
    """Columns of either, each strategy (and way to store what is tied) once."""
    seen = {(repr(c.strategy), c.tie) for c in few}
    return (*few, *(c for c in further if (repr(c.strategy), c.tie) not in seen))


def _of_family(columns: tuple[Column, ...], zero: int, recompute: str) -> tuple[Column, ...]:
    """Columns of a ZeRO level and recomputation; all where there is none."""
    mine = tuple(c for c in columns if (c.strategy.zero, c.strategy.recompute) == (zero, recompute))
    return mine or columns
