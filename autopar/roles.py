"""What each mesh axis does in a layer, read from its strategy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.plan import LayerStrategy, MeshAxis

BATCH_DIM = 0
"""Dim of activations that holds the samples: models take and hand on their batch first."""


def axis_role(strategy: LayerStrategy, axis: int) -> str:
    """What a mesh axis splits in a layer: `batch`, `sequence` (only), `tensor`, `tensor+sequence`, or `nothing`.

    An axis that splits the batch at the layer's entry is `batch`. Any other that splits work inside is `tensor`, with
    `sequence` where it splits activations on both sides of the layer as well, on another dim than the batch.
    """
    if strategy.entry[axis] == BATCH_DIM:
        return "batch"
    between = min(strategy.entry[axis], strategy.exit[axis]) > BATCH_DIM
    if any(factors[axis] for factors in strategy.ops.values()):
        return "tensor+sequence" if between else "tensor"
    return "sequence" if between else "nothing"


def ways(strategy: LayerStrategy, mesh: Sequence[MeshAxis]) -> dict[str, int]:
    """How many ways each role splits the layer; roles of one way are left out."""
    roles = strategy.roles or [axis_role(strategy, axis) for axis in range(len(mesh))]
    counts = {
        role: prod(a.size for a, r in zip(mesh, roles, strict=True) if r == role) for role in dict.fromkeys(roles)
    }
    return {role: count for role, count in counts.items() if count > 1}
