"""Where a model may be cut into pipeline stages, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autopar.formulate.labels import at_cut
from autopar.formulate.runs import LayerRun
from autopar.graph import DTYPE_BYTES, Layout, OpGraph, local_shape


def block_indices(graph: OpGraph) -> list[int]:
    """Layers that `layers=`, `stage_layers=` and `full:N` count: of classes that repeat, or all where none does."""
    classes = [layer.class_index for layer in graph.layers]
    repeated = [i for i, c in enumerate(classes) if classes.count(c) > 1]
    return repeated or list(range(len(classes)))


@dataclass(frozen=True)
class Units:
    """The model as the blocks that stages are made of: unit u is block u and the layers between it and the last one.

    The last unit has what comes behind the last block, too.
    """

    graph: OpGraph

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First layer of each unit, then the number of layers."""
        blocks = block_indices(self.graph)
        return (0, *(before + 1 for before in blocks[:-1]), len(self.graph.layers))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def slices(self, runs: tuple[LayerRun, ...], first: int, end: int) -> Iterator[tuple[int, int]]:
        """Runs that units `first` to `end - 1` have a part in: (index of the run, number of layers)."""
        low, high = self.starts[first], self.starts[end]
        for index, run in enumerate(runs):
            count = min(high, run.first_layer + run.count) - max(low, run.first_layer)
            if count > 0:
                yield index, count

    def crossing_bytes(self, unit: int, layout: Layout, sizes: tuple[int, ...], batch: int) -> int:
        """Bytes a device sends where unit `unit` begins a stage: all that crosses but inputs of the model."""
        cut = self.graph.cuts[self.starts[unit]]
        main = self.graph.values[cut.main]
        total = 0
        for name in cut.values:
            if name not in self.graph.inputs:
                spec = self.graph.values[name]
                (own,) = at_cut(spec, main, (layout,), name == cut.main)
                total += prod(local_shape(spec.shape_at(batch), own, sizes)) * DTYPE_BYTES[spec.dtype]
        return total


def even_cuts(units: int, stages: int) -> tuple[int, ...]:
    """Cuts that make stages as even as possible; the larger ones stand in the middle, away from embedding and head."""
    base, more = divmod(units, stages)
    first = (stages - more + 1) // 2
    sizes = [base + (first <= s < first + more) for s in range(stages)]
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    return tuple(cuts)
