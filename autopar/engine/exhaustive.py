"""The oracle: brute force for small problems. Shares the problem types with the other solvers and no code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, permutations, product

import numpy as np
from numpy.typing import NDArray

from autopar.engine.label_graph import LabelGraph
from autopar.engine.stack_problem import StackProblem


def minimum_table(graph: LabelGraph) -> NDArray[np.float64]:
    """(K, *L_keep): the least cost of `graph` for every labelling of the kept variables, by trying all labellings."""
    scenarios = graph.scenarios
    table = np.full((scenarios, *(graph.sizes[v] for v in graph.keep)), np.inf)
    for labels in product(*(range(n) for n in graph.sizes)):
        for k in range(scenarios):
            at = (k, *(labels[v] for v in graph.keep))
            table[at] = min(table[at], labelling_cost(graph, k, labels))
    return table


def labelling_cost(graph: LabelGraph, k: int, labels: tuple[int, ...]) -> float:
    """Cost of one labelling in scenario k."""
    cost = sum(float(t[min(k, len(t) - 1), labels[v]]) for v, t in graph.unary.items())
    return cost + sum(float(t[min(k, len(t) - 1), labels[i], labels[j]]) for (i, j), t in graph.pair.items())


@dataclass(frozen=True)
class StackOptimum:
    """`objective_s` is None when no legal stack fits; `smallest_peak_bytes` is None when there is no legal one."""

    objective_s: float | None
    smallest_peak_bytes: int | None


def best_stack(problem: StackProblem) -> StackOptimum:
    """The best stack by trying every sequence of choices, one for each layer."""
    objectives: list[float] = []
    peaks: list[int] = []
    for picks in product(*(_sequences(len(run.choices.micro_s), run.count) for run in problem.runs)):
        if not _legal(problem, picks):
            continue
        peak = _peak_bytes(problem, picks)
        peaks.append(peak)
        if problem.limit_bytes is None or peak <= problem.limit_bytes:
            objectives.append(_objective_s(problem, picks))
    return StackOptimum(min(objectives, default=None), min(peaks, default=None))


def _sequences(choices: int, count: int) -> Iterator[tuple[int, ...]]:
    for multiset in combinations_with_replacement(range(choices), count):
        yield from sorted(set(permutations(multiset)))


def _legal(problem: StackProblem, picks: tuple[tuple[int, ...], ...]) -> bool:
    layers = [(run.choices, c) for run, sequence in zip(problem.runs, picks, strict=True) for c in sequence]
    states = [(int(choices.entry[c]), int(choices.exit[c])) for choices, c in layers]
    ends = states[0][0] in problem.entry_states and states[-1][1] in problem.exit_states
    if not ends or any(before[1] != after[0] for before, after in pairwise(states)):
        return False
    tied: dict[int, set[int]] = {}
    for choices, c in layers:
        for tie, value in enumerate(choices.ties[c].tolist()):
            if value >= 0:
                tied.setdefault(tie, set()).add(value)
    return all(len(values) == 1 for values in tied.values())


def _objective_s(problem: StackProblem, picks: tuple[tuple[int, ...], ...]) -> float:
    seconds = problem.fixed_s
    for run, sequence in zip(problem.runs, picks, strict=True):
        for c in sequence:
            seconds += problem.num_microbatches * float(run.choices.micro_s[c]) + float(run.choices.step_s[c])
    return seconds


def _peak_bytes(problem: StackProblem, picks: tuple[tuple[int, ...], ...]) -> int:
    """docs/design.md, "Memory", read literally."""
    runs = [run.choices for run in problem.runs]

    def total(name: str, chosen: range) -> int:
        return sum(int(getattr(runs[r], name)[c]) for r in chosen for c in picks[r])

    everywhere = range(len(runs))
    static = problem.fixed_bytes + total("static_bytes", everywhere)
    moments = [static + total("grad_bytes", everywhere) + max(int(x.step_bytes[c]) for x, p in zip(runs, picks) for c in p)]
    for r in everywhere:
        held = everywhere if problem.num_microbatches > 1 else range(r, len(runs))
        transient = max(int(runs[r].transient_bytes[c]) for c in picks[r])
        moments.append(static + total("grad_bytes", held) + total("saved_bytes", range(r + 1)) + transient)
    return max(moments)
