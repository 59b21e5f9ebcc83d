"""Whose parameters are gathered again for the backward pass, under ZeRO 3."""

from __future__ import annotations

from autopar.graph import LayerClass
from autopar.shard.program import Call, Program, Relayout, read_by
from autopar.shard.saved import saved_names

SHAPES_ALONE = ("aten.embedding.default", "aten.add.Tensor")
"""Operators whose backward pass takes no more than the shape of a parameter: look-ups and sums, as in embeddings."""


def may_spare_parameters(layer: LayerClass) -> bool:
    """Whether there may be strategies under which the backward pass of a layer reads none of its parameters."""
    held = {*layer.params}
    readers = [op for op in layer.ops if held.intersection(op.operands)]
    return all(op.target in SHAPES_ALONE and not held.intersection(op.saved.values) for op in readers)


def backward_reads_parameters(program: Program) -> bool:
    """Whether the backward pass of a lowered layer reads parameters; what runs again does."""
    held = {*program.params}
    for step in program.steps:
        if isinstance(step, Relayout):
            held |= {step.result} if step.source in held else set()
        elif held.intersection(read_by(step)) and not _takes_shapes(step, held):
            return True
    return bool(program.regions)


def _takes_shapes(call: Call, held: set[str]) -> bool:
    return call.op.target in SHAPES_ALONE and not call.kernel and held.isdisjoint(saved_names(call))
