"""From counts to an order: a walk over states that takes every choice as often as counted (Hierholzer, 1873)."""

from __future__ import annotations

import numpy as np

from autopar.engine.errors import ProblemError
from autopar.engine.moments import Ints
from autopar.engine.stack_problem import Choices


def unreached_states(choices: Choices, counts: Ints, start: int) -> list[Ints]:
    """The connected parts of the used choices' states that do not hold `start`; empty when a walk exists."""
    used = np.flatnonzero(counts)
    part = {int(s): int(s) for s in np.concatenate([choices.entry[used], choices.exit[used], [start]])}

    def root(state: int) -> int:
        while part[state] != state:
            state = part[state]
        return state

    for c in used:
        part[root(int(choices.entry[c]))] = root(int(choices.exit[c]))
    parts: dict[int, list[int]] = {}
    for state in sorted(part):
        parts.setdefault(root(state), []).append(state)
    return [np.array(states) for states in parts.values() if start not in states]


def walk(choices: Choices, counts: Ints, start: int) -> tuple[tuple[int, int], ...]:
    """(choice, times in a row) in order, from state `start`; layers that keep the state stand together.

    Raises ProblemError when no walk from `start` takes every choice as often as counted.
    """
    used = np.flatnonzero(counts)
    keeps = choices.entry[used] == choices.exit[used]
    loops: dict[int, list[int]] = {}
    for c in used[keeps]:
        loops.setdefault(int(choices.entry[c]), []).append(int(c))
    steps: list[tuple[int, int]] = []
    state = start
    for move in [None, *_moves(choices, {int(c): int(counts[c]) for c in used[~keeps]}, start)]:
        if move is not None:
            if choices.entry[move] != state:
                raise ProblemError(f"choice {move} enters in state {choices.entry[move]}, but the walk is in {state}.")
            steps.append((move, 1))
            state = int(choices.exit[move])
        steps += [(c, int(counts[c])) for c in loops.pop(state, [])]
    if loops:
        raise ProblemError(f"states {sorted(loops)} are not reached from state {start}.")
    return tuple(steps)


def _moves(choices: Choices, left: dict[int, int], start: int) -> list[int]:
    """The order of the choices that change the state."""
    leaving: dict[int, list[int]] = {}
    for c in left:
        leaving.setdefault(int(choices.entry[c]), []).append(c)
    pending: list[tuple[int, int | None]] = [(start, None)]
    backwards: list[int] = []
    while pending:
        state, came_by = pending[-1]
        options = leaving.get(state, [])
        if not options:
            pending.pop()
            backwards += [] if came_by is None else [came_by]
            continue
        choice = options[0]
        left[choice] -= 1
        if not left[choice]:
            options.pop(0)
        pending.append((int(choices.exit[choice]), choice))
    return backwards[::-1]
