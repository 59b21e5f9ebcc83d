"""Where a model may be cut into pipeline stages, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.cost.activations import outputs_saved
from autopar.cost.work import layer_flops
from autopar.formulate.layers.labels import at_cut
from autopar.formulate.layers.runs import LayerRun
from autopar.graph import DTYPE_BYTES, Layout, OpGraph, TensorSpec, local_shape


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

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each unit, for one sample."""
        each = layer_flops(self.graph, 1)
        return tuple(sum(each[first:end]) for first, end in pairwise(self.starts))

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
        return self._bytes(unit, (n for n in cut.values if n not in self.graph.inputs), layout, sizes, batch)

    def held_bytes(
        self, runs: tuple[LayerRun, ...], unit: int, receives: bool, layout: Layout, sizes: tuple[int, ...], batch: int
    ) -> int:
        """Bytes of what crosses there that the stage behind (`receives`) or in front holds besides what layers save.

        A stage holds what it received and sent until the backward pass. Where the layer at the cut counts a value as
        saved it is the same memory.
        """
        cut, index = self.graph.cuts[self.starts[unit]], self.starts[unit] - (not receives)
        layer = self.graph.layers[index]
        around = next(run.around for run in runs if run.first_layer <= index < run.first_layer + run.count)
        own = self.graph.classes[layer.class_index]
        paid = outputs_saved(own) - around.held
        names = dict(zip((*own.inputs, *own.outputs), (*layer.inputs, *layer.outputs), strict=True))
        counted = {names[local] for local in paid}
        crossing = (n for n in cut.values if n not in self.graph.inputs and n not in counted)
        return self._bytes(unit, crossing, layout, sizes, batch)

    def _bytes(self, unit: int, names: Iterable[str], layout: Layout, sizes: tuple[int, ...], batch: int) -> int:
        """Bytes of a device's part of values that cross the cut in front of unit `unit`."""
        cut = self.graph.cuts[self.starts[unit]]
        total = 0
        for name in names:
            spec = self.graph.values[name]
            (own,) = at_cut(spec, self.graph.values[cut.main], (layout,), name == cut.main)
            total += prod(local_shape(spec, batch, own, sizes)) * DTYPE_BYTES[spec.dtype]
        return total


def batch_bytes(specs: Iterable[TensorSpec], batch: int, ways: int) -> int:
    """Bytes of the inputs of `batch` samples that a device is given where samples are dealt `ways` ways."""
    return sum(-(-spec.bytes_at(batch) // (ways if spec.batch_dim is not None else 1)) for spec in specs)


def even_cuts(units: int, stages: int) -> tuple[int, ...]:
    """Cuts that make stages as even as possible; the larger ones stand in the middle, away from embedding and head."""
    base, more = divmod(units, stages)
    first = (stages - more + 1) // 2
    sizes = [base + (first <= s < first + more) for s in range(stages)]
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    return tuple(cuts)


def balanced_cuts(work: Sequence[float], stages_of: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Cuts of units with so much `work` each that even out the work of groups; `stages_of`: the stages of each group.

    From even cuts on the group with most work hands a unit to the one with least, as long as that makes the most less;
    of their stages so that these become most alike.
    """
    before = np.concatenate([[0.0], np.cumsum(work)])

    def cuts_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(sizes)])

    def loads(sizes: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
        each = np.diff(before[cuts_of(sizes)])
        return np.array([sum(each[s] for s in own) for own in stages_of]), float(each @ each)

    def handed(sizes: NDArray[np.int64], most: int, least: int) -> Iterator[NDArray[np.int64]]:
        for giver, taker in product(stages_of[most], stages_of[least]):
            if giver != taker and sizes[giver] > 1:
                change = np.zeros_like(sizes)
                change[giver], change[taker] = -1, 1
                yield sizes + change

    sizes = np.diff(even_cuts(len(work), sum(map(len, stages_of))))
    while True:
        found, _ = loads(sizes)
        tried = [(loads(s), s) for s in handed(sizes, int(found.argmax()), int(found.argmin()))]
        less = [(alike, s) for (of, alike), s in tried if of.max() < found.max() * (1 - 1e-9)]
        if not less:
            return tuple(cuts_of(sizes).tolist())
        _, sizes = min(less, key=lambda one: one[0])
