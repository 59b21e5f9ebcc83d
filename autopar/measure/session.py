"""Who times: this process alone, or all ranks of the job at the same moment, as busy as the plan will have them.

Under torchrun rank 0 does its work in `lead` and every other rank is in `serve` meanwhile. Rank 0 tells them in
messages: `time` these keys with me, I am `done` with this result, or I have `failed` with this exception.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from autopar.graph import CollectiveKey, OpKey
from autopar.measure.collectives import time_collective
from autopar.measure.local import device_name, ranks_per_node
from autopar.measure.ops import release_buffers, time_op
from autopar.measure.profile import Environment, Sample, Timing


class Session(Protocol):
    """Times keys in one environment."""

    @property
    def environment(self) -> Environment:
        """Where the timings are taken."""
        ...

    def ops(self, keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        """Time local ops."""
        ...

    def collectives(self, keys: Sequence[CollectiveKey]) -> dict[CollectiveKey, Timing]:
        """Time collectives; empty where there is no job to time them in."""
        ...


Message: TypeAlias = tuple[str, Any]
"""What rank 0 tells the others: `time` and keys, `done` and a result, or `failed` and an exception."""
Result = TypeVar("Result")


@contextmanager
def measuring(device: torch.device) -> Iterator[Session]:
    """A session on `device`: with all ranks of the job where there is one (this being rank 0 in `lead`), else alone."""
    try:
        yield Together(device) if _in_job() else Alone(device)
    finally:
        release_buffers()


def lead(work: Callable[[], Result], device: torch.device) -> Result:
    """On rank 0: do `work` and let the other ranks go, with its result or with whatever it raises."""
    try:
        result = work()
        pickle.dumps(result)  # what can't be sent must not keep the others waiting
    except BaseException as error:
        _share(("failed", _sendable(error)), device)
        raise
    _share(("done", result), device)
    return result


def serve(device: torch.device) -> Any:
    """On ranks other than 0: time whatever rank 0 times; returns its result, or raises what it raises."""
    try:
        while True:
            kind, content = _share(None, device)
            if kind == "time":
                _time_together(content, device)
            elif kind == "done":
                return content
            else:
                raise content
    finally:
        release_buffers()


def _sendable(error: BaseException) -> BaseException:
    """`error`, or one that says the same where it can't be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class may refuse in any way
        return RuntimeError(f"rank 0 failed with {type(error).__name__}: {error}")
    return error


class Alone:
    """This process only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def environment(self) -> Environment:
        """This device with one process busy."""
        return environment_of(self._device, 1)

    def ops(self, keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        """Time local ops one after the other."""
        return {key: time_op(key, self._device) for key in keys}

    def collectives(self, keys: Sequence[CollectiveKey]) -> dict[CollectiveKey, Timing]:  # noqa: ARG002 - none
        """Nothing: one process has nobody to talk to."""
        return {}


class Together:
    """All ranks of the job; this one is rank 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def environment(self) -> Environment:
        """This device with every rank of the job busy."""
        return environment_of(self._device, dist.get_world_size())

    def ops(self, keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        """Time local ops on all ranks at once; repeats of all ranks count alike."""
        return self._time(list(keys))

    def collectives(self, keys: Sequence[CollectiveKey]) -> dict[CollectiveKey, Timing]:
        """Time collectives over the groups of the job."""
        return self._time(list(keys))

    def _time(self, keys: list[Key]) -> dict[Key, Timing]:
        if not keys:
            return {}
        _share(("time", keys), self._device)
        return dict(zip(keys, _time_together(keys, self._device), strict=True))


Key = TypeVar("Key", OpKey, CollectiveKey)


def environment_of(device: torch.device, busy_ranks: int) -> Environment:
    """The environment of timings taken on `device` by `busy_ranks` processes of a job at once."""
    nodes = busy_ranks // ranks_per_node(busy_ranks)
    return Environment(device_name(device), device.type, torch.__version__, torch.get_num_threads(), busy_ranks, nodes)


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _share(message: Message | None, device: torch.device) -> Message:
    """Rank 0's message, on every rank."""
    box: list[Any] = [message]
    dist.broadcast_object_list(box, 0, device=device)
    found: Message = box[0]
    return found


def _time_together(keys: Sequence[OpKey] | Sequence[CollectiveKey], device: torch.device) -> list[Timing]:
    """Time each key after a barrier; on rank 0 the timings of all ranks, joined."""
    mine = []
    for key in keys:
        dist.barrier()
        timer: Callable[..., Timing] = time_op if isinstance(key, OpKey) else time_collective
        mine.append(timer(key, device))
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, 0)
    return [_joined(timings) for timings in zip(*gathered, strict=True)] if gathered else mine


def _joined(timings: Sequence[Timing]) -> Timing:
    """Repeats of all ranks; failed where any rank failed."""
    failed = next((t.failed for t in timings if t.failed), "")
    if failed:
        return Timing(failed=failed)
    forward = tuple(s for t in timings for s in t.forward.raw_s)
    return Timing(Sample(forward), Sample(tuple(s for t in timings for s in t.backward.raw_s)))
