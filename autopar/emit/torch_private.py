"""Every private name of torch that this folder uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.autograd import Variable
from torch.distributed.constants import default_pg_timeout
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, _batch_p2p
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "RESHARD", "UNSHARD", "PrefixStore", "StorageWeakRef", "Store", "at_end_of_backward", "backward_of_stage",
    "copy_all", "is_profiled", "job_store", "job_timeout", "laid_out_as", "norms_of", "scale_all", "send_or_receive",
]  # fmt: skip


def job_timeout() -> timedelta:
    """How long a collective of the default process group may take; groups made later don't inherit it."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no default process group")
    kind = torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
    options = world._get_backend(kind).options  # backends that send nothing have none
    timeout: timedelta = options._timeout if options else default_pg_timeout
    return timeout


def job_store() -> Store:
    """The store through which the ranks of the job found each other."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running ends, after the callbacks queued before it."""
    Variable._execution_engine.queue_callback(callback)


def is_profiled() -> bool:
    """Whether a profiler is recording."""
    recording: bool = torch._C._autograd._profiler_enabled()
    return recording


def laid_out_as(example: Tensor, shard: Tensor) -> Tensor:
    """A DTensor with the layout of `example` of which this rank holds `shard`; `shard` where `example` is plain.

    It has the very record of the layout that `example` has: `from_local` makes a new one, at ten times the cost, and
    optimizers then compare the two in every operator.
    """
    return DTensor(shard, example._spec, requires_grad=False) if isinstance(example, DTensor) else shard


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place."""
    torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[Tensor], order: float) -> tuple[Tensor, ...]:
    """The norm of each tensor."""
    return tuple(torch._foreach_norm(list(tensors), order))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, casting where dtypes differ."""
    torch._foreach_copy_(list(targets), list(sources))


def backward_of_stage(arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The backward pass of a pipeline stage; returns the gradients of its inputs."""
    return stage_backward(arguments["stage_output"], arguments["output_grads"], arguments["input_values"])


def send_or_receive(what: list[dist.P2POp]) -> list[dist.Work]:
    """Begin to send, or to receive, as schedules do: both sides must use the same calls."""
    return _batch_p2p(what)
