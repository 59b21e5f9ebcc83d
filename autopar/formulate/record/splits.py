"""What the mesh axes of a layer split, for the words of a plan: read from its operators' rules."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.graph import LayerClass, Op
from autopar.plan import LayerStrategy
from autopar.roles import axis_role
from autopar.shard.experts import expert_factors, expert_parameters
from autopar.shard.rules import rule_for


def roles_of(strategy: LayerStrategy, layer: LayerClass, batch_dim: int | None) -> tuple[str, ...]:
    """For each axis what it splits between layers (`batch`, `sequence`) and of the matrices inside (`tensor`,
    `experts`), the latter in front of the sequence; `nothing` where ranks do the same. Where a layer is entered or left
    with the sequence split, and no matrix is, that counts as `sequence`: embeddings and heads.

    `batch_dim`: that of the main value at the layer's entry.
    """
    return tuple(_role(strategy, layer, batch_dim, axis) for axis in range(len(strategy.entry)))


def _role(strategy: LayerStrategy, layer: LayerClass, batch_dim: int | None, axis: int) -> str:
    kinds = {kind for op in layer.ops for kind in _matrices(op, layer, strategy.ops.get(op.name, ()), axis)}
    inside = [kind for kind in ("tensor", "experts") if kind in kinds]
    ends = strategy.entry[axis], strategy.exit[axis]
    if batch_dim is not None and ends[0] == batch_dim:
        return "+".join(["batch", *inside])
    if min(ends) >= 0 and ends[1] != batch_dim:
        return "+".join([*inside, "sequence"])
    if not inside and any(end >= 0 and end != batch_dim for end in ends):
        return "sequence"
    return "+".join(inside) or axis_role(strategy, axis)


def _matrices(op: Op, layer: LayerClass, factors: tuple[str, ...], axis: int) -> Iterator[str]:
    """`experts` for each matrix that the axis splits by what numbers the experts, else `tensor`."""
    if not factors or not factors[axis] or op.name in expert_parameters(layer):
        return
    rule, experts = rule_for(op, layer), expert_factors(layer).get(op.name, frozenset())
    for position, name in enumerate(op.operands if rule else ()):
        size = len(layer.values[name].shape) if name in layer.params else 0
        if rule and size > 1 and factors[axis] in rule.operands[position]:
            yield "experts" if factors[axis] in experts else "tensor"
