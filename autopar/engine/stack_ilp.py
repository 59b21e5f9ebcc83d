"""The stack problem as an integer program over counts: nothing in it grows with the number of layers.

For each run: how many layers take each choice, a flow from its entry to its exit state. A flow may hold a cycle that
the path does not touch; cuts against those are added when they appear (as subtour cuts in the travelling salesman
problem). The largest transient of a run is modelled by levels: level l costs the step from the next smaller transient.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.engine.ledger import NOTHING
from autopar.engine.mip import Columns, Floats, Mip
from autopar.engine.moments import Ints
from autopar.engine.stack_problem import Choices, Flow, FlowResult, StackProblem
from autopar.engine.walk import unreached_states


def fastest_flow(
    problem: StackProblem, relative_gap: float = 1e-6, time_limit_s: float | None = None, cutoff_s: float = np.inf
) -> FlowResult:
    """Least seconds (`fixed_s` left out, as in `cutoff_s`) under `limit_bytes`."""
    program = StackProgram(problem, [problem.seconds(r) for r in range(len(problem.runs))])
    if problem.limit_bytes is not None:
        program.limit(problem.limit_bytes)
    return program.solve(relative_gap, time_limit_s, cutoff_s)


def leanest_flow(problem: StackProblem, relative_gap: float = 1e-9, time_limit_s: float | None = None) -> FlowResult:
    """Least peak bytes, whatever the time; the limit is ignored. The bound is in bytes."""
    program = StackProgram(problem, [np.zeros(len(run.choices)) for run in problem.runs])
    program.minimise_peak()
    result = program.solve(relative_gap, time_limit_s)
    return replace(result, bound=result.bound * program.unit)


class StackProgram:
    """The integer program of a stack problem, with a cost for each choice of each run."""

    def __init__(self, problem: StackProblem, costs: list[Floats]) -> None:
        self.problem = problem
        self.mip = Mip()
        self.counts = [
            self.mip.columns(len(run.choices), run.count, cost, integer=True)
            for run, cost in zip(problem.runs, costs, strict=True)
        ]
        self.unit = float(max(1, max(int(held.max(initial=0)) for held in problem.ledger.held)))
        self._flow()
        self._ties()

    def _flow(self) -> None:
        runs = self.problem.runs
        states = self.problem.states
        allowed = np.ones((len(runs) + 1, states))
        for side, ends in ((0, self.problem.entry_states), (-1, self.problem.exit_states)):
            allowed[side] = np.isin(np.arange(states), ends)
        self.at = [self.mip.columns(states, upper, integer=True) for upper in allowed]
        start = self.mip.rows(1, 1.0, 1.0)
        self.mip.entries(start, self.at[0], 1.0)
        for r, run in enumerate(runs):
            rows = self.mip.rows(states, 0.0, 0.0)
            self.mip.entries(rows, self.at[r], 1.0)
            self.mip.entries(rows, self.at[r + 1], -1.0)
            self.mip.entries(rows[run.choices.exit], self.counts[r], 1.0)
            self.mip.entries(rows[run.choices.entry], self.counts[r], -1.0)
            self.mip.entries(self.mip.rows(1, run.count, run.count), self.counts[r], 1.0)
            self._start(r)

    def _start(self, run: int) -> None:
        """The first layer of a run enters in the state in front of it; so does a single layer, and nowhere else."""
        count, choices = self.problem.runs[run].count, self.problem.runs[run].choices
        rows = self.mip.rows(self.problem.states, 0.0, 0.0 if count == 1 else np.inf)
        self.mip.entries(rows[choices.entry], self.counts[run], 1.0)
        self.mip.entries(rows, self.at[run], -1.0)
        if count > 1:
            for state in np.unique(choices.entry[choices.entry == choices.exit]):
                self._cut(run, np.array([state]))

    def _ties(self) -> None:
        for tie in range(self.problem.runs[0].choices.ties.shape[1]):
            values = [run.choices.ties[:, tie] for run in self.problem.runs]
            known = np.setdiff1d(np.concatenate(values), [-1])
            taken = self.mip.columns(len(known), 1.0, integer=True)
            self.mip.entries(self.mip.rows(1, 0.0, 1.0), taken, 1.0)
            for run, of_choice, counts in zip(self.problem.runs, values, self.counts, strict=True):
                for value, column in zip(known, taken, strict=True):
                    self._only_if(counts[of_choice == value], run.count, [column])

    def _only_if(self, counts: Columns, most: int, switches: list[int] | Columns) -> None:
        """The sum of `counts` is at most `most` times the sum of `switches`."""
        if len(counts):
            row = self.mip.rows(1, -np.inf, 0.0)
            self.mip.entries(row, counts, 1.0)
            self.mip.entries(row, switches, -float(most))

    def limit(self, limit_bytes: int) -> None:
        """At every moment at most `limit_bytes`."""
        self._moments(float(limit_bytes))

    def minimise_peak(self) -> None:
        """Make the peak the objective."""
        peak = self.mip.columns(1, np.inf, 1.0)
        self.mip.entries(self._moments(0.0), peak, -1.0)

    def _moments(self, upper_bytes: float) -> Columns:
        """A row for each moment: what is held then, less than `upper_bytes`."""
        ledger = self.problem.ledger
        rows = np.array([int(self.mip.rows(1, -np.inf, (upper_bytes - b) / self.unit)[0]) for b in ledger.base])
        for counts, held in zip(self.counts, ledger.held, strict=True):
            self.mip.entries(rows[:, None], counts[None], held / self.unit)
        alike: dict[bytes, list[int]] = {}
        for k, extra in enumerate(np.concatenate(ledger.extra, axis=1)):
            alike.setdefault(extra.tobytes(), []).append(k)
        for same in alike.values():
            sizes = {r: of[same[0]] for r, of in enumerate(ledger.extra) if of[same[0], 0] > NOTHING}
            self._largest(rows[same], list(sizes.values()), list(sizes))
        return rows

    def _largest(self, rows: Columns, sizes: list[Ints], runs: list[int]) -> None:
        """Add to `rows` the largest of `sizes` among the choices that the `runs` use."""
        levels = np.unique(np.concatenate(sizes))
        floor = max(int(s.min()) for s in sizes)
        levels = np.unique(np.maximum(levels, floor))
        switches = self.mip.columns(len(levels) - 1, 1.0, integer=True)
        for row in rows:
            self._constant(int(row), floor)
            self.mip.entries(int(row), switches, np.diff(levels) / self.unit)
        for level, switch in zip(levels[1:], switches, strict=True):
            for r, of_choice in zip(runs, sizes, strict=True):
                self._only_if(self.counts[r][of_choice >= level], self.problem.runs[r].count, [int(switch)])

    def _constant(self, row: int, value: int) -> None:
        """Add a constant to `row`: all layers of the first run together are its count."""
        run = self.problem.runs[0]
        self.mip.entries(row, self.counts[0], value / run.count / self.unit)

    def solve(self, relative_gap: float, time_limit_s: float | None, cutoff: float = np.inf) -> FlowResult:
        """Solve, adding cuts until the flow of every run hangs together."""
        result = self.mip.solve(relative_gap, time_limit_s, cutoff, self._cut_loose)
        flow = None if result.values is None else self._flow_of(result.values)
        return FlowResult(flow, result.bound, result.complete)

    def _cut_loose(self, values: Floats) -> bool:
        """Forbid cycles that the path does not touch; whether there were any."""
        flow = self._flow_of(values)
        found = False
        for r, run in enumerate(self.problem.runs):
            for states in unreached_states(run.choices, flow.counts[r], flow.starts[r]):
                self._cut(r, states)
                found = True
        return found

    def _flow_of(self, values: Floats) -> Flow:
        counts = tuple(np.rint(values[columns]).astype(np.int64) for columns in self.counts)
        return Flow(counts, tuple(int(np.argmax(values[columns])) for columns in self.at[:-1]))

    def _cut(self, run: int, component: Ints) -> None:
        """Layers inside `component` need a way into it: a layer from outside, or the run starting there."""
        choices: Choices = self.problem.runs[run].choices
        into = np.isin(choices.exit, component)
        inside = into & np.isin(choices.entry, component)
        ways = np.concatenate([self.counts[run][into & ~inside], self.at[run][component]])
        self._only_if(self.counts[run][inside], self.problem.runs[run].count, ways)
