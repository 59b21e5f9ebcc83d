"""What the mesh axes of a layer split, for the words of a plan: read from its operators' rules."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.graph import LayerClass, Op
from autopar.plan import LayerStrategy
from autopar.roles import axis_role
from autopar.shard.rules import rule_for


def roles_of(strategy: LayerStrategy, layer: LayerClass, batch_dim: int | None) -> tuple[str, ...]:
    """For each axis what it splits between layers (`batch`, `sequence`) and of the matrices inside (`tensor`,
    `experts`), the latter in front of the sequence; `nothing` where ranks do the same.

    `batch_dim`: that of the main value at the layer's entry.
    """
    return tuple(_role(strategy, layer, batch_dim, axis) for axis in range(len(strategy.entry)))


def _role(strategy: LayerStrategy, layer: LayerClass, batch_dim: int | None, axis: int) -> str:
    kinds = {kind for op in layer.ops for kind in _matrices(op, layer, strategy.ops.get(op.name, ()), axis)}
    inside = [kind for kind in ("tensor", "experts") if kind in kinds]
    if batch_dim is not None and strategy.entry[axis] == batch_dim:
        return "+".join(["batch", *inside])
    if min(strategy.entry[axis], strategy.exit[axis]) >= 0 and strategy.exit[axis] != batch_dim:
        return "+".join([*inside, "sequence"])
    return "+".join(inside) or axis_role(strategy, axis)


def _matrices(op: Op, layer: LayerClass, factors: tuple[str, ...], axis: int) -> Iterator[str]:
    """`experts` for each matrix that the axis splits by what operands and results have, too, else `tensor`."""
    rule = rule_for(op, layer) if factors and factors[axis] else None
    for position, name in enumerate(op.operands if rule else ()):
        size = len(layer.values[name].shape) if name in layer.params else 0
        if rule and size > 1 and factors[axis] in rule.operands[position]:
            others = [dims for i, dims in enumerate(rule.operands) if i != position]
            everywhere = all(factors[axis] in dims for dims in (*others, *rule.results))
            yield "experts" if everywhere and size > 2 else "tensor"
