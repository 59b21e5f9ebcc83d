"""The oracle: brute force for small problems. Shares the problem types with the other solvers and no code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from autopar.engine.label_graph import LabelGraph
from autopar.engine.stack_problem import Backward, Run, StackProblem


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
    """The best stack by trying every way to put a choice on each layer.

    Ways through a run that differ in order only count once: neither seconds nor bytes depend on the order.
    """
    objectives: list[float] = []
    peaks: list[int] = []
    for ways in product(*(_ways(run) for run in problem.runs)):
        if not _legal(problem, ways):
            continue
        picks = tuple(way.picks for way in ways)
        peak = _peak_bytes(problem, picks)
        peaks.append(peak)
        if problem.limit_bytes is None or peak <= problem.limit_bytes:
            objectives.append(_objective_s(problem, picks))
    return StackOptimum(min(objectives, default=None), min(peaks, default=None))


@dataclass(frozen=True, order=True)
class _Way:
    """A way through a run: the state in front, the state behind and the choices, sorted."""

    entry: int
    exit: int
    picks: tuple[int, ...]


def _ways(run: Run) -> list[_Way]:
    choices = run.choices
    ways = {_Way(int(choices.entry[c]), int(choices.exit[c]), (c,)) for c in range(len(choices))}
    for _ in range(run.count - 1):
        ways = {
            _Way(way.entry, int(choices.exit[c]), tuple(sorted((*way.picks, c))))
            for way in ways
            for c in range(len(choices))
            if choices.entry[c] == way.exit
        }
    return sorted(ways)


def _legal(problem: StackProblem, ways: tuple[_Way, ...]) -> bool:
    ends = ways[0].entry in problem.entry_states and ways[-1].exit in problem.exit_states
    if not ends or any(before.exit != after.entry for before, after in pairwise(ways)):
        return False
    tied: dict[int, set[int]] = {}
    for run, way in zip(problem.runs, ways, strict=True):
        for c in way.picks:
            for tie, value in enumerate(run.choices.ties[c].tolist()):
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
    everywhere = range(len(runs))

    def total(name: str, chosen: Iterable[int] = everywhere) -> int:
        return sum(int(getattr(runs[r], name)[c]) for r in chosen for c in picks[r])

    static = problem.fixed_bytes + total("static_bytes")
    temporaries = max(int(runs[r].step_bytes[c]) for r in everywhere for c in picks[r])
    moments = [
        static + total("grad_bytes") + temporaries,
        static + total("reduced_bytes") + total("update_bytes"),
    ]
    for backward in problem.backwards or (Backward(0, (1,), (problem.num_microbatches > 1,)),):
        for r in everywhere:
            if problem.runs[r].chunk == backward.chunk:
                moments.append(static + _at_run(problem, picks, backward, r, total))
    return max(moments)


def _at_run(
    problem: StackProblem,
    picks: tuple[tuple[int, ...], ...],
    backward: Backward,
    r: int,
    total: Callable[[str, Iterable[int]], int],
) -> int:
    """What is held beside the static bytes while run `r` of the backward's chunk is passed."""
    held = backward.held_bytes
    late = backward.put_off or (0,) * len(backward.saved)
    for k, run in enumerate(problem.runs):
        done = run.chunk == backward.chunk and k > r  # this microbatch has left it: its gradients exist
        held += (backward.saved[run.chunk] - done) * total("saved_bytes", [k])
        held += (late[run.chunk] + (done and backward.puts_off)) * total("put_off_bytes", [k])
        held += total("grad_bytes", [k]) if done or backward.grown[run.chunk] else 0
    own = problem.runs[r].choices
    transient = [int(own.transient_bytes[c]) for c in picks[r]]
    grows, parts = not backward.grown[backward.chunk], backward.puts_off
    if grows or parts:
        # layer by layer gradients, and what is put off, take the place of saved bytes; the layer passed holds all it
        # saved, its gradients, and its temporaries, to which what is put off belongs
        if parts:
            transient = [int(own.parting_bytes[c]) for c in picks[r]]
        saved = [int(own.saved_bytes[c]) for c in picks[r]]
        made = [grows * int(own.grad_bytes[c]) for c in picks[r]]
        into = [m + parts * int(own.put_off_bytes[c]) for m, c in zip(made, picks[r], strict=True)]
        larger = [max(pair) for pair in zip(saved, into, strict=True)]
        held += sum(larger) - sum(saved)
        transient = [sum(bytes_) - more for *bytes_, more in zip(transient, saved, made, larger, strict=True)]
    return held + max(transient)
