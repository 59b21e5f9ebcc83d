"""Scenarios are looked at by two processes: the other one works ahead on its half, in the order of what they promise.

What a look finds depends on earlier looks at chains over the same mesh alone (`Siblings`). Scenarios are shared out by
their meshes' sizes, and each process looks at its own in the order in which the search asks for them: so the answer is
that of one process, whatever the pace of either.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from multiprocessing import Pipe, parent_process
from multiprocessing.connection import Connection
from typing import Any

from autopar.engine.search import Scenario
from autopar.formulate.chains.siblings import Siblings
from autopar.formulate.scenario import StageScenario
from autopar.formulate.space import AnyScenario

AHEAD = 16
"""Looks that the other process takes at most before they are asked for."""
NEAR = 1.05
"""While the other process is waited for, scenarios that promise this many times its seconds are looked at."""
PROCESSES = "AUTOPAR_PROCESSES"
"""The environment variable that says how many processes a search may use."""


@dataclass
class Look:
    """A look at a scenario that is to be taken, which is worth no less than `bound`; `promise` is what it showed."""

    scenario: int
    level: int
    bound: float
    asked: Scenario[Any]
    promise: float = inf

    def take(self) -> float:
        """What the scenario promises."""
        self.promise = self.asked.looks[self.level]()
        return self.promise


def may_fork() -> bool:
    """Whether a search may use a second process: where AUTOPAR_PROCESSES says 2 or more, on Linux, in a process that
    nobody else has begun to share work out."""
    return os.environ.get(PROCESSES, "1") not in ("", "0", "1") and sys.platform == "linux" and not parent_process()


class Ahead:
    """Looks at `scenarios` as a search asks for them, half of them by another process; ends it on leaving."""

    def __init__(self, scenarios: Sequence[AnyScenario], asked: Sequence[Scenario[Any]]) -> None:
        self._scenarios, self._asked = scenarios, asked
        self._theirs = _shared_out(scenarios)
        self._mine = _looks(asked, [i for i, theirs in enumerate(self._theirs) if not theirs])
        self._next: Look | None = next(self._mine, None)
        self._known: dict[tuple[int, int], float] = {}
        self._promised = [one.quick for one in asked]
        here, there = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there are threads: what they lock isn't used there
            self._process = os.fork()
        if not self._process:
            here.close()
            _work(there, scenarios, asked, [i for i, theirs in enumerate(self._theirs) if theirs])
        there.close()
        self._pipe: Connection | None = here

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pipe is not None:
            self._pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def look(self, scenario: int, level: int) -> float:
        """What a look at a scenario promises; scenarios are asked for in the order of what they promise."""
        key = scenario, level
        while key not in self._known:
            if self._theirs[scenario] and self._pipe is None:
                return self._asked[scenario].looks[level]()
            if not self._theirs[scenario] or self._has_time(scenario):
                self._look_at_mine()
            else:
                self._hear()
        promise = self._known.pop(key)
        self._promised[scenario] = max(self._promised[scenario], promise)
        return promise

    def _has_time(self, awaited: int) -> bool:
        """Whether there is a scenario worth looking at while another one is waited for."""
        waiting = self._pipe is not None and not self._pipe.poll()
        return waiting and self._next is not None and self._next.bound <= NEAR * self._promised[awaited]

    def _look_at_mine(self) -> None:
        if self._next is not None:
            self._known[self._next.scenario, self._next.level] = self._next.take()
            self._next = next(self._mine, None)

    def _hear(self) -> None:
        """Wait for what the other process has found, and let it look at one more."""
        if self._pipe is None:
            return
        try:
            scenario, level, promise, findings = self._pipe.recv()
            self._pipe.send(None)
        except (EOFError, OSError):
            self._pipe = None
            return
        self._known[scenario, level] = promise
        for own, finding in zip(_siblings(self._scenarios[scenario]), findings, strict=True):
            own.learn(finding)


def _work(pipe: Connection, scenarios: Sequence[AnyScenario], asked: Sequence[Scenario[Any]], mine: list[int]) -> None:
    """The other process: look at scenarios and tell, until nobody listens any more."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # pages that are only read stay shared
        ahead = 0
        for look in _looks(asked, mine):
            promise = look.take()
            findings = [own.news() for own in _siblings(scenarios[look.scenario])]
            pipe.send((look.scenario, look.level, promise, findings))
            ahead += 1
            while ahead >= AHEAD or pipe.poll():
                pipe.recv()
                ahead -= 1
    finally:
        os._exit(0)  # nothing of the process that began it is to be closed or flushed


def _looks(asked: Sequence[Scenario[Any]], mine: Sequence[int]) -> Iterator[Look]:
    """Looks at some scenarios, each taken before the next one is asked for, in the order of what they promise."""
    heap = [(asked[i].quick, 0, i) for i in mine]
    heapify(heap)
    while heap:
        bound, level, i = heappop(heap)
        if bound < inf and level < len(asked[i].looks):
            look = Look(i, level, bound, asked[i])
            yield look
            heappush(heap, (max(bound, look.promise), level + 1, i))


def _shared_out(scenarios: Sequence[AnyScenario]) -> list[bool]:
    """Which scenarios the other process looks at: those over every other mesh."""
    numbers: dict[tuple[int, ...], int] = {}
    return [bool(numbers.setdefault(s.chains.setting.sizes, len(numbers)) % 2) for s in scenarios]


def _siblings(scenario: AnyScenario) -> list[Siblings]:
    """All that a look at a scenario may change."""
    chains = [scenario.chains] if isinstance(scenario, StageScenario) else [book.chains for book in scenario.books]
    return list(dict.fromkeys(own.siblings for own in chains))
