"""A batch of random values for a traced model, of the kind of its example inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.graph import Extent, OpGraph


def random_batch(
    graph: OpGraph, examples: Sequence[Tensor], global_batch: int, seed: int, device: torch.device
) -> list[Tensor]:
    """A tensor of `global_batch` samples for each input of the graph; `examples` are given in the same order.

    Floats are normal. Integers lie below the rows of the embedding, or the number of classes, that they index; where
    they index nothing they are drawn from the example's values (ones if it has none), where forward computes with them
    before they index (offsets of tables, widths of boxes) from its samples.
    """
    generator = torch.Generator().manual_seed(seed)
    limits, computed = index_limits(graph)
    batch = []
    for name, example in zip(graph.inputs, examples, strict=True):
        spec = graph.values[name]
        shape, dtype = spec.shape_at(global_batch), getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        elif name in limits and name not in computed:
            values = torch.randint(limits[name], shape, generator=generator).to(dtype)
        elif example.is_meta or not example.numel():
            values = torch.ones(shape, dtype=dtype)
        elif name in computed and spec.shape[0] == Extent(1):
            samples = torch.randint(len(example), (global_batch,), generator=generator)
            values = example.detach().cpu()[samples].to(dtype)
        else:
            flat = example.detach().reshape(-1).cpu()
            values = flat[torch.randint(len(flat), shape, generator=generator)].to(dtype)
        batch.append(values.to(device))
    return batch


_COMPUTING = {"add", "sub", "rsub", "mul", "neg", "div", "floor_divide", "remainder", "fmod", "cumsum", "sum", "pow"}
"""Operators behind which numbers have other limits."""


def index_limits(graph: OpGraph) -> tuple[dict[str, int], set[str]]:
    """For each integer input that indexes something how many things there are, and which are computed with before."""
    origin = {name: (name, False) for name in graph.inputs}
    limits: dict[str, int] = {}
    computed: set[str] = set()
    for layer in graph.layers:
        layer_class = graph.classes[layer.class_index]
        local = {n: origin[w] for n, w in zip(layer_class.inputs, layer.inputs, strict=True) if w in origin}
        for op in layer_class.ops:
            counted = {"embedding": (1, 0, 0), "cross_entropy_loss": (1, 0, 1)}.get(op.target.split(".")[1])
            if counted and len(op.operands) > 1 and op.operands[counted[0]] in local:
                shape = layer_class.values[op.operands[counted[1]]].shape
                count = shape[min(counted[2], len(shape) - 1)].fixed
                index, changed = local[op.operands[counted[0]]]
                limits[index] = min(count, limits.get(index, count))
                computed |= {index} if changed else set()
            derived = next((local[n] for n in op.operands if n in local), None)
            if derived:
                changed = derived[1] or op.target.split(".")[1] in _COMPUTING
                local.update((r, (derived[0], changed)) for r in op.results if "int" in layer_class.values[r].dtype)
        origin.update((w, local[n]) for n, w in zip(layer_class.outputs, layer.outputs, strict=True) if n in local)
    return limits, computed
