"""Every private name of torch that this folder uses."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def group_named(name: str) -> dist.ProcessGroup:
    """The process group whose `group_name` is `name`."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def place_in(name: str) -> int:
    """This process' rank in the group called `name`; 0 where `name` is empty (no group, one share)."""
    return group_named(name).rank() if name else 0
