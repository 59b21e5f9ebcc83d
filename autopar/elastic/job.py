"""A training job that plans anew when one of its devices has become slow."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.cluster import Cluster, MixedCluster
from autopar.elastic.migrate import keeping_random, migrate
from autopar.elastic.paced import device_numbers, for_ranks, numbered, paced
from autopar.elastic.probe import probe
from autopar.elastic.watch import Watch, gain_s, most_gained_s, speeds
from autopar.emit.module import ParallelModule
from autopar.errors import ConfigError
from autopar.formulate.planner import Planner
from autopar.formulate.record.recost import recost
from autopar.measure.profile import Profile
from autopar.measure.session import environment_of
from autopar.measure.store import Store
from autopar.plan import PlanRecord
from autopar.pricing import LOCAL, find_cluster, pricing
from autopar.ranks import on_rank_0

BUILD_S = 10.0
"""Seconds that the first change of plans is taken to need, beside moving what is kept; later ones as measured."""
BYTES_PER_S = 2e8
"""Rate at which a device's states are taken to be saved and loaded until that was measured."""


class Elastic:
    """Watches the steps of a job, and lets it go on under a better plan where a device has become slow.

    `module` and `optimizer` (over its parameters) are what trains; they stay the same objects under every plan, with
    other parameters in them. `model` is what the module was made of (on meta will do), `steps` how many the job will
    take in all. `cluster` and `profile` are those it was planned with. A change of plans goes through a folder that all
    ranks see: a temporary one where they are on one machine, else one inside `folder`.

    A step is off where it takes 1 + `tolerance` times as long as usual. After `patience` in a row each rank times a
    piece of the plan's own work. Where some need 1 + `tolerance` times as long for it as others, the job is planned
    anew for devices of that pace; the new plan is taken where it saves more than changing costs (`change_s`, or what
    the last change took) until the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        folder: str | Path | None = None,
        cluster: Cluster | str | Path = LOCAL,
        profile: str | Path | None = None,
        patience: int = 5,
        tolerance: float = 0.25,
        change_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timed: Callable[[PlanRecord, torch.device], float] = probe,
    ) -> None:
        if patience < 1 or not tolerance > 0:
            raise ConfigError(
                f"patience={patience}, tolerance={tolerance}: give a number of steps, 1 or more, and a share above 0"
            )
        apart = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < int(os.environ.get("WORLD_SIZE", "1"))
        if folder is None and apart:
            raise ConfigError("folder: the ranks are on several machines; give a folder that all of them see")
        self.module, self.optimizer, self.steps = module, optimizer, steps
        self._model, self._folder, self._profile = model, folder, profile
        self._cluster = find_cluster(cluster)
        if self._cluster.devices != (there := dist.get_world_size() if dist.is_initialized() else 1):
            raise ConfigError(
                f"cluster {self._cluster.name} has {self._cluster.devices} devices, the job {there} ranks"
            )
        self._patience, self._tolerance, self._change_s = patience, tolerance, change_s
        self._clock, self._timed = clock, timed
        # Small numbers of the host: no device has to wait for them.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._numbers = device_numbers(module.record, self._cluster)
        self._watch = Watch(module.record.step_time_s, patience, tolerance)
        self._began_s = clock()

    def step(self) -> bool:
        """Call after each step of the optimizer, on every rank (collective); whether the plan is another now.

        Where it is, `module.data_parallel_rows()` are other rows, and `module.record` is the new plan. Gradients are
        dropped: call it after `optimizer.zero_grad()`.
        """
        seconds = self._everyone(self._clock() - self._began_s)
        changed = self._watch.see(median(seconds)) and self._react()
        self._began_s = self._clock()
        return changed

    # --- how --------------------------------------------------------------------------------------------------------

    @property
    def remaining(self) -> int:
        """Steps that are left."""
        return max(0, self.steps - self.module.steps)

    def _react(self) -> bool:
        """Find out which ranks are slow; plan anew and change where that pays."""
        with keeping_random(self.module.made_of.device):
            record = self._better(self._paces())
            if record is not None:
                self._change(record)
        if record is None:
            self._watch.settle()
        else:
            self._watch = Watch(record.step_time_s, self._patience, self._tolerance)
        return record is not None

    def _better(self, paces: Sequence[float]) -> PlanRecord | None:
        """A plan for ranks of this pace that saves more than it costs to change to, if there is one."""
        if most_gained_s(self._watch.now_s, paces, self.remaining) <= self._cost_s:
            return None
        record, saved_s = on_rank_0(lambda: self._planned_anew(paces))
        return record if saved_s > self._cost_s else None

    def _paces(self) -> tuple[float, ...]:
        """The pace of each rank's device."""
        seconds = self._everyone(self._timed(self.module.record, self.module.made_of.device))
        return speeds(seconds, [self._kind(d) for d in self._numbers[: len(seconds)]], self._tolerance)

    def _kind(self, device: int) -> object:
        """What a device has in common with others that should be as fast."""
        cluster = self._cluster
        if not isinstance(cluster, MixedCluster):
            return cluster.device.name
        part = cluster.part_of_node(cluster.node_of_device(device)).device
        return part.name, part.speed

    def _planned_anew(self, paces: Sequence[float]) -> tuple[PlanRecord | None, float]:
        """The plan for ranks of this pace with the seconds it would save, on rank 0; None where there is none."""
        by_device = [pace for _, pace in sorted(zip(self._numbers, paces, strict=True))]
        there = paced(self._cluster, by_device)
        ranks = {d: self._numbers.index(number) for d, number in enumerate(there.numbers)}
        running = numbered(self.module.record, {rank: d for d, rank in ranks.items()})
        request = replace(running.request, config=None)
        try:
            with pricing(there.cluster, self._timings()) as pricer:
                old = recost(running, pricer)
                new = Planner(self.module.made_of.graph, there.cluster, pricer, request).plan()
        except Exception as error:  # a job that runs is not ended by a plan that can't be made
            warnings.warn(f"the job goes on as it is, since planning anew failed: {error}", stacklevel=2)
            return None, 0.0
        saved_s = gain_s(self._watch.now_s, old.step_time_s, new.step_time_s, self.remaining)
        return numbered(for_ranks(new, ranks), dict(enumerate(self._numbers))), saved_s

    def _timings(self) -> str | Path | Profile | None:
        """What prices come from: the profile given, or what this machine has timed so far."""
        if self._profile is not None or self._cluster.name != LOCAL:
            return self._profile
        return Store().profile(environment_of(self.module.made_of.device, self._cluster.devices))

    def _change(self, record: PlanRecord) -> None:
        began_s = self._clock()
        with self._meeting_folder() as folder:
            migrate(self.module, self.optimizer, self._model, record, folder)
        self._change_s = max(self._everyone(self._clock() - began_s))

    @property
    def _cost_s(self) -> float:
        """What a change of plans takes."""
        if self._change_s is not None:
            return self._change_s
        held = self.module.record.memory_by_category
        return BUILD_S + 2 * (held["parameters"] + held["optimizer"]) / BYTES_PER_S

    def _everyone(self, number: float) -> list[float]:
        """Each rank's number, on all."""
        if self._group is None:
            return [number]
        own = torch.tensor([number], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(every, own, group=self._group)
        return [float(n) for n in every]

    @contextmanager
    def _meeting_folder(self) -> Iterator[Path]:
        """An empty folder that all ranks see, removed when all went well: else it has what was kept."""
        first = self._group is None or dist.get_rank() == 0
        made: list[Any] = [None]
        if first:
            parent = None if self._folder is None else Path(self._folder)
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            made = [tempfile.mkdtemp(prefix="change-of-plans-", dir=parent)]
        if self._group is not None:
            dist.broadcast_object_list(made, 0, group=self._group)
        yield Path(made[0])
        if self._group is not None:
            dist.barrier(self._group)
        if first:
            shutil.rmtree(made[0], ignore_errors=True)
