"""Which rows of the global batch each rank runs on, and how they get there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.emit.groups import Axes, StageGroups
from autopar.emit.inputs import rows_of
from autopar.emit.loss_weights import Weights
from autopar.errors import EmitError
from autopar.graph import Extent, OpGraph, is_even
from autopar.shard.collectives import relayout

SAMPLES = Extent(1)


@dataclass(frozen=True)
class Rows:
    """Which rows of the global batch a rank is given, and what its microbatches weigh in the loss.

    `groups` is this rank's group of devices as the first stage's mesh has it, `data_axes` those of its axes that the
    rows are dealt over, `planned` the samples of a global microbatch a plan was made for, `piped`: in a pipeline.
    """

    groups: StageGroups
    data_axes: Axes
    weights: Weights
    planned: int
    piped: bool = False

    @property
    def ways(self) -> int:
        """Into how many parts the global batch is dealt."""
        return self.groups.ways(self.data_axes)

    def lengths(self, batch: int) -> tuple[int, ...]:
        """How many rows each part has of a global microbatch of `batch` samples."""
        return self.groups.spot.lengths(SAMPLES, batch, (), self.data_axes)

    def part(self, total: int, count: int) -> range:
        """This rank's rows of a global batch of `total` samples in `count` microbatches.

        Raises EmitError where they can't be cut so.
        """
        if total % count:
            fewer = total // count * count
            raise EmitError(
                f"a batch of {total} samples can't be cut into {count} equal microbatches: take {fewer} samples or "
                f"{fewer + count}, or a plan of other microbatches."
            )
        first, length = self.groups.spot.part(SAMPLES, total // count, self.data_axes)
        return range(count * first, count * (first + length))

    def samples(self, batch: int, k: int, count: int) -> Tensor:
        """The number in the global batch of each sample of the `k`-th of `count` microbatches, by part."""
        found, first = [], 0
        for rows in self.lengths(batch):
            found.append(torch.arange(first + k * rows, first + (k + 1) * rows))
            first += count * rows
        return torch.cat(found)

    def deal(self, graph: OpGraph, values: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], int]:
        """This rank's rows for `count` microbatches, and the samples of a global one.

        The ranks tell each other how many they were given (collective), and pass on what isn't theirs to run. Under a
        plan for equal parts on accelerators, which this would make wait, each keeps what it is given instead, and all
        have to be given as many. Raises EmitError where the rows can't be cut into so many microbatches.
        """
        rows = rows_of(graph, values)
        even = is_even(self.planned, 1, [self.groups.sizes[a] for a in self.data_axes])
        if self.ways == 1 or (even and self.groups.device.type != "cpu"):
            return values, rows // count * self.ways
        given = self._told(rows)
        if even and len({*given}) == 1 and not rows % count:
            return values, rows // count * self.ways
        if even and self.piped:
            raise EmitError(
                f"the ranks passed {', '.join(map(str, given))} samples; under this pipeline all have to pass equally "
                f"many, a multiple of its {count} microbatches. Leave out what is over."
            )
        batch, left = divmod(sum(given), count)
        if left:
            raise EmitError(
                f"{sum(given)} samples on all ranks ({', '.join(map(str, given))}) can't be cut into {count} equal "
                f"microbatches. Pass a multiple."
            )
        if given != [count * n for n in self.lengths(batch)]:
            values = {name: self._passed_on(graph, name, value, given, count) for name, value in values.items()}
        return values, batch

    def require_one_each(self, batch: int) -> None:
        """Raise EmitError where a global microbatch is empty, or in a pipeline leaves a rank none, as stages wait."""
        if batch < 1:
            raise EmitError("a batch without samples has no loss. Pass some, or leave this batch out.")
        if self.piped and batch < self.ways:
            raise EmitError(
                f"a global microbatch of {batch} samples can't be dealt over the {self.ways} ranks of a stage. "
                f"Pass more, or leave this batch out."
            )

    def _told(self, rows: int) -> list[int]:
        """How many rows each part was given."""
        every = torch.zeros(self.ways, dtype=torch.int64, device=self.groups.device)
        every[self.groups.index(self.data_axes)] = rows
        dist.all_reduce(every, group=self.groups.group(self.data_axes))
        return every.tolist()

    def _passed_on(self, graph: OpGraph, name: str, value: Tensor, given: list[int], count: int) -> Tensor:
        """This rank's rows of an input of which each part was given so many."""
        dim = graph.values[name].batch_dim
        if dim is None:
            return value
        unit = graph.values[name].shape[dim].per_sample
        cut = ",".join(str(n * unit) for n in given) if len({*given}) > 1 else str(len(given))
        whole = relayout(value, (f"all_gather {dim} -1 {cut} {self.groups.name(self.data_axes)}",), ())
        own = self.part(sum(given), count)
        return whole.narrow(dim, own.start * unit, len(own) * unit)


def slice_rows(values: Mapping[str, Tensor], graph: OpGraph, rows: range) -> dict[str, Tensor]:
    """Those rows of whole inputs."""
    found = {}
    for name, value in values.items():
        dim = graph.values[name].batch_dim
        unit = 1 if dim is None else graph.values[name].shape[dim].per_sample
        found[name] = value if dim is None else value.narrow(dim, rows.start * unit, len(rows) * unit)
    return found
