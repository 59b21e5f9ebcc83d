"""The process groups and device meshes of one stage, made once for each set of mesh axes and reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.emit.torch_private import job_timeout
from autopar.errors import PlanError
from autopar.plan import MeshAxis, StagePlan, prime_sizes
from autopar.shard.cuts import Spot

Axes = tuple[int, ...]
"""Indices of mesh axes, ascending: several axes act as one, the first outermost."""


def make_groups(rows: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """A group for each row of global ranks; returns the one this rank is in. Collective over the whole job.

    A collective that hangs ends after the job's own timeout (that of `init_process_group`).
    """
    world = dist.group.WORLD
    if world is not None and list(rows[0]) == list(range(world.size())):
        return world
    mine, _ = dist.new_subgroups_by_enumeration([list(row) for row in rows], timeout=job_timeout())
    return mine  # type: ignore[no-any-return]


class StageGroups:
    """Groups over the axes of a stage's mesh.

    Making a group is collective over the whole job: every rank, idle ones too, must ask for the same axes in the same
    order. `coordinate` is this rank's place on each axis, None on a rank outside the stage.
    """

    def __init__(self, stage: StagePlan, device: torch.device) -> None:
        self.sizes = tuple(axis.size for axis in stage.mesh)
        self.device = device
        self._check(stage)
        self._ranks = torch.tensor(stage.devices).reshape(self.sizes)
        self._groups: dict[Axes, dist.ProcessGroup | None] = {}
        self._meshes: dict[object, DeviceMesh] = {}
        rank = dist.get_rank() if dist.is_initialized() else 0
        place = (self._ranks == rank).nonzero()
        self.coordinate: tuple[int, ...] | None = tuple(place[0].tolist()) if len(place) else None

    def _check(self, stage: StagePlan) -> None:
        if prod(self.sizes) != len(stage.devices):
            raise PlanError(
                f"a stage of {len(stage.devices)} devices has mesh axes of sizes {self.sizes}, "
                f"{prod(self.sizes)} devices. Make the plan anew."
            )
        if list(stage.devices) != sorted(stage.devices):
            raise PlanError(f"a stage's devices are {stage.devices}; they must ascend. Make the plan anew.")

    @property
    def distributed(self) -> bool:
        """Whether the stage has a mesh; without one it is one device alone, with or without torch.distributed."""
        return bool(self.sizes) and dist.is_initialized()

    @property
    def spot(self) -> Spot:
        """This rank's place on the mesh, as shapes follow from it."""
        return Spot(self.sizes, self.coordinate or ())

    @property
    def all_axes(self) -> Axes:
        """Every axis of the mesh."""
        return tuple(range(len(self.sizes)))

    def ways(self, axes: Axes) -> int:
        """Number of ranks over `axes`."""
        return prod(self.sizes[a] for a in axes)

    def index(self, axes: Axes) -> int:
        """This rank's index among the ranks over `axes` (0 on an idle rank)."""
        index = 0
        for a in axes:
            index = index * self.sizes[a] + (self.coordinate[a] if self.coordinate else 0)
        return index

    def group(self, axes: Axes) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one only on `axes`; None on an idle rank."""
        if axes not in self._groups:
            self._groups[axes] = make_groups(self._rows(axes))
        return self._groups[axes]

    def made(self, axes: Axes) -> bool:
        """Whether there is a group over `axes` already, so that asking for it is not collective."""
        return axes in self._groups

    def name(self, axes: Axes) -> str:
        """Name of `group(axes)`, as dispatcher ops take it ('' on an idle rank)."""
        group = self.group(axes)
        return str(group.group_name) if group is not None else ""

    def _rows(self, axes: Axes) -> list[list[int]]:
        rest = [a for a in self.all_axes if a not in axes]
        rows: list[list[int]] = self._ranks.permute(*rest, *axes).reshape(-1, self.ways(axes)).tolist()
        return rows

    def mesh(self, dims: tuple[Axes, ...], kind: str) -> DeviceMesh:
        """A mesh with one dim for each group of axes in `dims`; together they must be all axes of the stage.

        `kind` of device that tensors on it are on.
        """
        key = (kind, dims)
        if key not in self._meshes:
            groups = [self.group(axes) for axes in dims]
            order = [a for axes in dims for a in axes]
            ranks = self._ranks.permute(order).reshape([self.ways(axes) for axes in dims])
            if len(dims) == 1:
                self._meshes[key] = DeviceMesh.from_group(groups[0], kind, mesh=ranks)  # type: ignore[arg-type]
            else:
                names = tuple("_".join(f"d{a}" for a in axes) for axes in dims)
                self._meshes[key] = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)  # type: ignore[arg-type]
        return self._meshes[key]

    def over_primes(self, stage: StagePlan) -> StageGroups:
        """Groups over the prime factors of the axes of `stage`, this one's: those of two stages compare."""
        return StageGroups(refined(stage), self.device)

    def line(self, axes: Axes) -> DeviceMesh:
        """A mesh of one dim, for FSDP: this rank's group over `axes`."""
        key = (axes, ())
        if key not in self._meshes:
            kind = "cpu" if self.device.type == "meta" else self.device.type
            self._meshes[key] = DeviceMesh.from_group(self.group(axes), kind)  # type: ignore[arg-type]
        return self._meshes[key]


def refined(stage: StagePlan) -> StagePlan:
    """`stage` with a mesh over the prime factors of its axes."""
    sizes = prime_sizes(tuple(axis.size for axis in stage.mesh))
    axes = tuple(MeshAxis(f"d{i}", size, prod(sizes[i + 1 :])) for i, size in enumerate(sizes))
    return replace(stage, mesh=axes)
