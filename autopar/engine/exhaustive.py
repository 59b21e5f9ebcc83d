"""The oracle: brute force for small problems. Shares the problem types with the other solvers and no code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from autopar.engine.label_graph import LabelGraph
from autopar.engine.moments import Backward
from autopar.engine.stack_problem import Choices, Run, StackProblem


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
    begun = [all_ or some for all_, some in zip(backward.grown, backward.begun or backward.grown, strict=True)]
    for k, run in enumerate(problem.runs):
        chunk, own = run.chunk, run.chunk == backward.chunk
        if own and backward.half == 2:  # first run first gradients of weights are made of what was put off
            held += backward.saved[chunk] * total("saved_bytes", [k]) + total("grad_bytes", [k])
            held += (late[chunk] + (k >= r)) * total("put_off_bytes", [k]) - (k >= r) * total("late_bytes", [k])
            continue
        done = own and k > r  # this microbatch has left it: its gradients exist, but for what is put off
        held += (backward.saved[chunk] - done) * total("saved_bytes", [k])
        held += (late[chunk] + (done and backward.half == 1)) * total("put_off_bytes", [k])
        held += total("grad_bytes", [k]) if done or begun[chunk] else 0
        if not backward.grown[chunk] and (begun[chunk] or done) and not (done and backward.half == 0):
            held -= total("late_bytes", [k])
    layers = [
        _passing(problem.runs[r].choices, c, backward.half, begun[backward.chunk], backward.grown[backward.chunk])
        for c in picks[r]
    ]
    return held + sum(more for more, _ in layers) + max(alone for _, alone in layers)


def _passing(of: Choices, c: int, half: int, begun: bool, grown: bool) -> tuple[int, int]:
    """Of a layer of the run that is passed: what it may hold more than before; what it holds more while it runs.

    One after the other layers turn saved bytes into gradients and what is put off, or that into gradients of weights;
    the one that runs holds both, and its temporaries, to which what is put off belongs.
    """
    saved, gradients, late, put_off, transient, parting = (
        int(getattr(of, f"{name}_bytes")[c]) for name in ("saved", "grad", "late", "put_off", "transient", "parting")
    )
    if half == 0 and grown:
        return 0, transient
    if half == 2:
        before, made, after, temporary = put_off, late, late, 0
    else:
        made = (0 if begun else gradients - late) + (0 if grown or half == 1 else late)
        before, after, temporary = saved, made + half * put_off, (transient, parting)[half]
    larger = max(before, after)
    return larger - before, before + made + temporary - larger
