"""The groups of devices that a pipeline's stages stand on, and the process groups that reach over them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.emit import buckets
from autopar.emit.groups import make_groups
from autopar.emit.parameters import local
from autopar.graph import OpGraph
from autopar.plan import StagePlan
from autopar.schedules import group_of


class Teams:
    """Teams of ranks, one for each group of devices: rank j of a team sends to rank j of the next (their *line*).

    Making them is collective over the whole job. `team` is the number of this rank's team, None on an idle rank.
    """

    def __init__(self, graph: OpGraph, stages: tuple[StagePlan, ...], count: int, schedule: str) -> None:
        rank = dist.get_rank()
        teams = [stage.devices for stage in stages[:count]]
        self.team = next((i for i, team in enumerate(teams) if rank in team), None)
        self.everyone = make_groups([sorted(d for team in teams for d in team)])
        self.line = make_groups(list(zip(*teams, strict=True)))
        self._holders = holders(graph, stages, count, schedule)
        sharing = sorted({ids for ids in self._holders.values() if len(ids) > 1})
        self._tied = {ids: make_groups(list(zip(*(teams[i] for i in ids), strict=True))) for ids in sharing}

    def counts(self, name: str) -> bool:
        """Whether this rank's team is the one that counts parameter `name` in sums over the whole model."""
        return self.team == self._holders[name][0]

    def sum_tied(self, gradients: dict[str, Tensor], publics: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Sum the gradients (this rank's shards, on `device`) of those parameters that several teams hold, in place.

        A team without a gradient of its own gets that of the others.
        """
        for ids, group in self._tied.items():
            if self.team not in ids:
                continue
            names = [n for n, i in self._holders.items() if i == ids and publics[n].requires_grad]
            for name in names:
                if name not in gradients:
                    gradients[name] = torch.zeros_like(local(publics[name].detach()), device=device)
            buckets.all_reduce([gradients[n] for n in names], group)


def holders(graph: OpGraph, stages: tuple[StagePlan, ...], count: int, schedule: str) -> dict[str, tuple[int, ...]]:
    """The teams that hold each parameter: those with a layer that reads it, the first where none does."""
    found: dict[str, set[int]] = {name: set() for name in graph.params}
    for i, stage in enumerate(stages):
        for layer in graph.layers[stage.first_layer :][: len(stage.assignment)]:
            for name in layer.params:
                found[name].add(group_of(schedule, i, count))
    return {name: tuple(sorted(ids)) or (0,) for name, ids in found.items()}
