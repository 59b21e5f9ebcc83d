"""Points dealt to worker processes. A worker that dies costs at most its point one more try; none outlives the job."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from autopar.errors import as_document
from autopar.jobs.points import Point
from autopar.jobs.work import Result

Solve = Callable[[Point], Result]
TRIES = 2
"""How often a point is tried whose process dies."""


class _Worker:
    """A process that solves one point after the other."""

    def __init__(self, solve: Solve) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, solve), daemon=True)
        self.process.start()
        theirs.close()
        self.point: Point | None = None

    def give(self, waiting: deque[Point]) -> None:
        """Begin the next point, if there is one."""
        self.point = waiting.popleft() if waiting else None
        if self.point:
            with suppress(BrokenPipeError):  # it has died: waiting for its answer says so
                self.connection.send(self.point)

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def solved_by_team(points: Sequence[Point], solve: Solve, workers: int) -> Iterator[Result]:
    """Results as they are found by so many processes; a point whose process dies twice has failed."""
    waiting, deaths = deque(points), Counter[str]()
    team = [_Worker(solve) for _ in range(min(workers, len(points)))]
    try:
        for worker in team:
            worker.give(waiting)
        while busy := {worker.connection: i for i, worker in enumerate(team) if worker.point}:
            for connection in wait(list(busy)):
                place = busy[connection]  # type: ignore[index]
                found = _received(team[place], deaths)
                if team[place].process.exitcode is not None:
                    team[place].end()
                    team[place] = _Worker(solve)
                if isinstance(found, Result):
                    yield found
                else:
                    waiting.appendleft(found)
                team[place].give(waiting)
    finally:
        for worker in team:
            worker.end()


def _received(worker: _Worker, deaths: Counter[str]) -> Result | Point:
    """The result of a worker's point, or the point where the worker has died and it may be tried again."""
    point = worker.point
    if point is None:
        raise ValueError("a worker without a point has no result")
    try:
        found: Result = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        deaths[point.name] += 1
        if deaths[point.name] < TRIES:
            return point
        return lost(point, f"its process ended {TRIES} times with code {worker.process.exitcode}")
    return found


def lost(point: Point, why: str) -> Result:
    """That a point could not be solved because processes died."""
    message = f"{why}; give it more memory (fewer workers at a time), or run `autopar plan` for it alone"
    return Result(point.name, as_document(ChildProcessError(message)), message + "\n")


def _serve(connection: Connection, solve: Solve) -> None:
    """Solve points until there are no more, or the process that deals them is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            point = connection.recv()
        except EOFError:
            return
        connection.send(solve(point))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
