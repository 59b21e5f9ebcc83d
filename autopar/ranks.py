"""The ranks of this torchrun job: their devices, and what they do together before training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.accelerator import runtime
from autopar.errors import ConfigError
from autopar.measure.session import lead, serve

Result = TypeVar("Result")


def local_device() -> torch.device:
    """The device of this rank: the cuda device of its local rank where there is one, else the cpu."""
    if runtime().is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % runtime().device_count())
    return torch.device("cpu")


def device_named(device: str | torch.device | None) -> torch.device:
    """The device asked for, by default this rank's; raises ConfigError where the machine has none of its kind."""
    found = local_device() if device is None else torch.device(device)
    if found.type == "cuda" and not runtime().is_available():
        raise ConfigError(f"device {str(found)!r}: this machine has no cuda device that torch can use; give cpu")
    return found


def join_job(backend: str | None = None) -> int:
    """Number of ranks; under torchrun the default process group is made if the script has not done so.

    `backend` is that of torch.distributed: by default nccl where ranks have cuda devices, else gloo.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = local_device()
        if device.type == "cuda":
            runtime().set_device(device)
        rank, world_size = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, rank=rank, world_size=world_size)
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Do `work` on rank 0, give every rank its result; the others time operators meanwhile if rank 0 asks.

    Collective over the job. Whatever rank 0 raises is raised on all. Outside a job the process just does it.
    """
    if join_job() == 1:
        return work()
    result: Result = lead(work, local_device()) if dist.get_rank() == 0 else serve(local_device())
    return result
