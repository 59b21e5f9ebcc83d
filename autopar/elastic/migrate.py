"""From the plan that runs to another in the same job, bit for bit, by way of a checkpoint."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autopar.checkpoints import Checkpoints
from autopar.emit.build import emit
from autopar.emit.module import ParallelModule
from autopar.plan import PlanRecord


def migrate(
    pm: ParallelModule, optimizer: torch.optim.Optimizer, model: nn.Module, record: PlanRecord, folder: Path
) -> None:
    """Let `pm` and `optimizer` go on under `record`, in `folder` (empty, seen by all ranks) meanwhile.

    `pm` and `optimizer` stay the same objects, so that schedulers and hooks stay with them. What the old plan held is
    dropped before the new one is laid out: no rank holds more than one of them asks for. Parameters, buffers, states of
    the optimizer and its options are those saved, random numbers go on. Gradients are dropped. Collective.
    """
    graph, loss, device = pm.made_of
    groups = _groups_by_name(pm, optimizer)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(pm.steps, pm, optimizer)
    _let_go(optimizer)
    pm.let_go()
    gc.collect()  # modules and their hooks refer to one another
    with keeping_random(device):
        pm.become(emit(record, graph, model, device=device, loss=loss))
    _take(optimizer, pm, groups)
    checkpoints.load(pm, optimizer)


@contextmanager
def keeping_random(device: torch.device) -> Iterator[None]:
    """Whatever is drawn meanwhile, random numbers of Python, the host and `device` go on as if it hadn't been."""
    drawn = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(drawn)


def _groups_by_name(pm: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number of the optimizer's group that each parameter of the model is in; of those on other ranks, too."""
    numbers = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    own = {name: numbers[id(p)] for name, p in pm.named_parameters() if id(p) in numbers}
    every: list[dict[str, int]] = [own]
    if dist.is_initialized():
        every = [{}] * dist.get_world_size()
        dist.all_gather_object(every, own)
    return {name: i for of_rank in every for name, i in of_rank.items()}


def _let_go(optimizer: torch.optim.Optimizer) -> None:
    """Drop parameters and states."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


def _take(optimizer: torch.optim.Optimizer, pm: ParallelModule, groups: dict[str, int]) -> None:
    """Give the optimizer the module's parameters, each in its group (as made for the first, where there are fewer)."""
    for _ in range(len(optimizer.param_groups), 1 + max(groups.values(), default=0)):
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    for name, parameter in pm.named_parameters():
        if name in groups:
            optimizer.param_groups[groups[name]]["params"].append(parameter)
