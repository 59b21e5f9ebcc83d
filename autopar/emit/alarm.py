"""A rank that fails tells the others, so that none waits for it until the job's timeout."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from autopar.emit.torch_private import PrefixStore, Store, job_store
from autopar.errors import EmitError

PERIOD_S, GRACE_S = 1.0, 5.0
"""How often a rank that is inside a call looks for failures, and how long it may go on after it has seen another's."""


class Alarm:
    """Guards calls that all ranks of the job make together, in one order.

    The error of a rank that fails is left in the job's store. A rank whose communication breaks off then says whose
    error was first. One that is still inside the call (or the next) `GRACE_S` later waits for what never comes, in
    torch's own code, which nothing interrupts: its process ends. Where all ranks fail alike, each may go on.
    Without a `store` nothing is guarded.
    """

    def __init__(self, store: Store | None, rank: int = 0) -> None:
        self._store, self._rank = store, rank
        self._number = 0
        self._failed: set[int] = set()
        self.since_s: float | None = None

    @classmethod
    def of_job(cls) -> Alarm:
        """One for a module that all ranks make together."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None)
        store, rank = job_store(), dist.get_rank()
        number = store.add(f"autopar/made/{rank}", 1)
        return cls(PrefixStore(f"autopar/{number}", store), rank)

    @contextmanager
    def call(self, where: str) -> Iterator[None]:
        """Guard one call; `where` says what it is.

        Raises EmitError, which names the rank that failed first, in place of a RuntimeError.
        """
        if self._store is None:
            yield
            return
        self._number += 1
        self.since_s = time.monotonic()
        _WATCH.look_at(self)
        try:
            yield
        except Exception as error:
            self._failed.add(self._number)
            place = f"rank {self._rank} at {where}"
            first = self._left(f"{place}: {type(error).__name__}: {error}")
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            others = "" if first.startswith(place) else f" The first to fail was {first}"
            raise EmitError(f"{place}: broken off: {error}.{others}") from error
        finally:
            self.since_s = None

    def _left(self, failure: str) -> str:
        """Leave this rank's failure for the others; the one that was left first."""
        with suppress(RuntimeError):  # the store may be gone with its rank
            return self._store.compare_set(str(self._number), "", failure).decode()  # type: ignore[union-attr]
        return failure

    def failure(self) -> str:
        """What another rank has left about this call or the one before, if it is not this one's failure, too."""
        for number in (self._number - 1, self._number):
            if number not in self._failed and self._store is not None and self._store.check([str(number)]):
                return self._store.get(str(number)).decode()
        return ""


class _Watch:
    """Looks, in a thread of its own, whether this process waits for a rank that has failed."""

    def __init__(self) -> None:
        self._alarm: Alarm | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def look_at(self, alarm: Alarm) -> None:
        """Watch the calls of `alarm` from now on."""
        self._alarm = alarm
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True, name="autopar alarm")
            self._thread.start()

    def end(self) -> None:
        """End the thread, before the interpreter does: inside torch's code that would abort the process."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(GRACE_S)

    def _run(self) -> None:
        seen: tuple[float, float] | None = None  # when the call began, and when it was seen that another failed
        while not self._over.wait(min(PERIOD_S, GRACE_S)):
            alarm = self._alarm
            began = None if alarm is None else alarm.since_s
            if alarm is None or began is None or time.monotonic() - began < PERIOD_S:
                continue
            failure = ""
            with suppress(RuntimeError):
                failure = alarm.failure()
            if failure and (seen is None or seen[0] != began):
                seen = began, time.monotonic()
            elif failure and seen and time.monotonic() - seen[1] > GRACE_S and alarm.since_s == began:
                _end(failure)


def _end(failure: str) -> None:
    """End this process, saying why and where it was."""
    print(f"autopar: this process waits for a rank that has failed, and ends. {failure}", file=sys.stderr)
    with suppress(Exception):  # standard error may be no file
        faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os._exit(1)


_WATCH = _Watch()
atexit.register(_WATCH.end)
