"""A search by two processes."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from itertools import count

import pytest

from autopar.engine.search import Answer
from autopar.formulate import ahead, searched
from autopar.formulate.ahead import Ahead, may_fork
from autopar.formulate.record.assemble import Solved
from autopar.formulate.space import AnyScenario, Space
from tests.formulate.cases import planner

CLUSTER, BATCH = "8xa100-80gb", 32
Case = tuple[int | None, tuple[str, ...]]
CASES: tuple[Case, ...] = ((None, ()), (4 << 20, ()), (4 << 20, ("exclude=pp",)), (1, ()))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork processes")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Searches use two processes; the numbers of those begun. None is left afterwards."""
    began: list[int] = []
    fork = os.fork

    def counted() -> int:
        began.append(fork())
        return began[-1]

    monkeypatch.setattr(os, "fork", counted)
    monkeypatch.setattr(searched, "may_fork", lambda: True)
    yield began
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def scenarios_of(limit_bytes: int | None, constraints: tuple[str, ...]) -> tuple[AnyScenario, ...]:
    """A space with pipelines."""
    maker = planner("gpt", CLUSTER, BATCH, limit_bytes, constraints)
    space = Space(maker.graph, maker.cluster, maker.pricer, maker.request)
    return tuple(space.searched(maker.request.devices, maker.limit_bytes))


def answered(limit_bytes: int | None, constraints: tuple[str, ...]) -> Answer[Solved]:
    """Two plans, searched for as in a large space."""
    return searched.searched(scenarios_of(limit_bytes, constraints), 2, thorough=False)


def told(answer: Answer[Solved]) -> tuple[object, ...]:
    """All that a search says."""
    names = [(found.name, found.objective) for found in (answer.best, *answer.alternatives) if found]
    return names, answer.outcome, answer.bounds, answer.bounded, answer.solved


@pytest.fixture(scope="module")
def alone() -> dict[Case, tuple[object, ...]]:
    """What one process answers."""
    return {case: told(answered(*case)) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_answer_as_one(case: Case, forks: list[int], alone: dict[Case, tuple[object, ...]]) -> None:
    """Answers, bounds and counts are those of one process to the last digit: with room, under a limit, of one stage,
    and where nothing fits."""
    found = told(answered(*case))
    assert len(forks) == 1
    assert found == alone[case]


@pytest.mark.parametrize("looks", [0, 1, 20])
def test_a_process_that_dies_is_done_without(
    looks: int, forks: list[int], alone: dict[Case, tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at once or after some looks, its part is taken over: the answer is the same."""
    whole, taken = Ahead.look, count()

    def look(self: Ahead, scenario: int, level: int) -> float:
        if next(taken) == looks:
            os.kill(forks[0], signal.SIGKILL)
        return whole(self, scenario, level)

    monkeypatch.setattr(Ahead, "look", look)
    assert told(answered(*CASES[1])) == alone[CASES[1]]
    assert next(taken) > looks


def test_an_error_ends_the_other_process(forks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in a search is told as it is, and no process is left behind."""

    def fail(_self: Ahead, _scenario: int, _level: int) -> float:
        raise RuntimeError("no look")

    monkeypatch.setattr(Ahead, "look", fail)
    with pytest.raises(RuntimeError, match="no look"):
        answered(*CASES[0])
    assert len(forks) == 1


def test_two_processes_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search keeps to itself unless AUTOPAR_PROCESSES asks for more."""
    monkeypatch.delenv(ahead.PROCESSES, raising=False)
    assert not may_fork()
    monkeypatch.setenv(ahead.PROCESSES, "1")
    assert not may_fork()
    monkeypatch.setenv(ahead.PROCESSES, "2")
    assert may_fork() == (sys.platform == "linux")


def test_seconds_are_those_of_both(forks: list[int]) -> None:
    """What a search is said to have taken counts the other process."""
    began = cpu_s()
    record = planner("gpt", "16xa100-80gb", 96).plan()
    spent = [now - then for now, then in zip(cpu_s(), began, strict=True)]
    assert forks
    assert spent[1] > 0.1 * spent[0]
    assert 0.9 * sum(spent) < record.search_s < sum(spent) + 0.05


def cpu_s() -> tuple[float, float]:
    """CPU seconds of this process and of those ended."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, ended.ru_utime + ended.ru_stime
