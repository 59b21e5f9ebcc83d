"""One pool of rank processes for all multi-process tests.

Ranks are forked from a server process that has imported torch once, so starting (and restarting) them is quick. Each
task gets a fresh default process group (gloo) and the environment torchrun would give it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_S = 3.0
"""How long the other ranks may take to finish or fail once one has failed."""
START_S = 300.0
"""How long new ranks may take until they can be given a task, imports on a busy machine included."""
GROUP_TIMEOUT = timedelta(minutes=5)


class RankError(AssertionError):
    """A task failed on some rank; the text starts with the traceback of the rank that failed first."""


@dataclass(frozen=True)
class Task:
    """`function(*args)` on `world_size` ranks; `name` keeps the keys of its process group apart from other tasks'."""

    name: str
    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What a rank says of a task: its result, or the text of its error; `time_s` (monotonic) orders failures."""

    ok: bool
    value: Any
    time_s: float


@dataclass(frozen=True)
class Rank:
    """The parent's handle of one rank process; `log` is where it writes its stack when it is asked to."""

    process: Any
    connection: Connection
    log: Path


class Pool:
    """Rank processes, started when first needed. Not for use from several threads."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed.tensor.debug", "torch.distributed.fsdp"])
        self._ranks: list[Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store: Any = None
        self._tasks = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call `function(*args)` on ranks 0 to `world_size` - 1 at once; the results in order of rank.

        `function` is a module-level function and arguments and results are picklable. Inside it
        `torch.distributed` is initialised, the random seed is 0 and results should be plain data or CPU tensors.
        Raises RankError with the first failing rank's traceback, or with every rank's stack after `timeout_s`.
        """
        self._start(world_size)
        self._tasks += 1
        message = pickle.dumps(Task(str(self._tasks), world_size, function, args))
        for rank in self._ranks[:world_size]:
            rank.connection.send_bytes(message)
        return self._collect(world_size, timeout_s)

    def close(self) -> None:
        """End all rank processes; the next task starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks.clear()

    def _start(self, world_size: int) -> None:
        import torch.distributed as dist

        if any(not rank.process.is_alive() for rank in self._ranks):
            self.close()
        if self._store is None:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        old = len(self._ranks)
        while len(self._ranks) < world_size:
            index = len(self._ranks)
            ours, theirs = self._context.Pipe()
            log = Path(self._folder.name, f"{index}.log")
            process = self._context.Process(target=_serve, args=(index, self._store.port, theirs, log), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(Rank(process, ours, log))
        for rank in self._ranks[old:]:  # so that no task pays for the start
            if not rank.connection.poll(START_S):
                self.close()
                raise RankError(f"a rank had not started after {START_S:g} s")
            rank.connection.recv_bytes()

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {rank.connection: index for index, rank in enumerate(self._ranks[:world_size])}
        answers: dict[int, Answer] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                index = waiting.pop(connection)
                answers[index] = self._receive(index)
                if not answers[index].ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting or not all(answer.ok for answer in answers.values()):
            self._fail(world_size, timeout_s, list(waiting.values()), answers)
        return [answers[index].value for index in range(world_size)]

    def _receive(self, index: int) -> Answer:
        rank = self._ranks[index]
        try:
            answer: Answer = pickle.loads(rank.connection.recv_bytes())
            return answer
        except EOFError:
            rank.process.join(GRACE_S)
            text = f"the process died with exit code {rank.process.exitcode}\n{rank.log.read_text()}"
            return Answer(False, text, time_s=0.0)

    def _fail(self, world_size: int, timeout_s: float, hung: list[int], answers: dict[int, Answer]) -> None:
        failures = sorted((a.time_s, index, a.value) for index, a in answers.items() if not a.ok)
        late = f"{GRACE_S:g} s after the first failure" if failures else f"after {timeout_s:g} s"
        stacks = self._stacks(hung)
        if hung or any(not self._ranks[index].process.is_alive() for index in answers):
            self.close()
        parts = [f"rank {index} of {world_size} failed:\n{text}" for _, index, text in failures]
        parts += [
            f"rank {index} of {world_size} had not finished {late}; it was at:\n{stacks[index]}" for index in hung
        ]
        raise RankError("\n".join(parts))

    def _stacks(self, hung: list[int]) -> dict[int, str]:
        """Where the hung ranks are: each dumps its stack on SIGUSR1."""
        for index in hung:
            os.kill(self._ranks[index].process.pid, signal.SIGUSR1)
        if hung:
            time.sleep(0.3)
        return {index: self._ranks[index].log.read_text() for index in hung}


def _serve(index: int, port: int, connection: Connection, log: Path) -> None:
    """Run tasks until the parent goes away."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    with log.open("w") as out:
        faulthandler.enable(out, all_threads=False)
        faulthandler.register(signal.SIGUSR1, out, all_threads=False)
        torch.set_num_threads(1)
        connection.send_bytes(b"started")
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(index, store, message))


def _answer(index: int, store: Any, message: bytes) -> bytes:
    try:
        return pickle.dumps(_perform(index, store, pickle.loads(message)))
    except BaseException:
        return pickle.dumps(_failure())


def _failure() -> Answer:
    return Answer(False, traceback.format_exc(), time.monotonic())


def _perform(index: int, store: Any, task: Task) -> Answer:
    import torch
    import torch.distributed as dist

    size = str(task.world_size)
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    torch.manual_seed(0)
    random.seed(0)
    keys = dist.PrefixStore(task.name, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=keys, rank=index, world_size=task.world_size, timeout=GROUP_TIMEOUT)
    try:
        return Answer(True, task.function(*task.args), time.monotonic())
    except BaseException:
        return _failure()  # before the group goes, as that makes the others fail
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Drop what DTensor has worked out for meshes, which it would use for those that look alike, with groups long gone.

    It keeps the groups, too: each has a thread that wakes a hundred times a second. What is left is looked at no more.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", int)()  # newer than torch 2.11
    gc.collect()
    gc.freeze()
