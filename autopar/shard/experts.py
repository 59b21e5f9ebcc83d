"""Which ops of a layer compute with experts: products with a stack of matrices, each for inputs of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from autopar.graph import LayerClass, Op
from autopar.shard.factors import OpRule
from autopar.shard.rules import rule_for


def stacked(op: Op, rule: OpRule, layer: LayerClass) -> frozenset[str]:
    """Factors of parameters of three dims and more that all operands and results have: the numbers of experts."""
    return frozenset(
        factor
        for position, name in enumerate(op.operands)
        if name in layer.params and len(layer.values[name].shape) > 2
        for factor in rule.operands[position]
        if factor and all(factor in dims for dims in (*rule.operands, *rule.results))
    )


@lru_cache(maxsize=256)
def expert_factors(layer: LayerClass) -> Mapping[str, frozenset[str]]:
    """For each op (by name) that has experts the factors that number them: products, and what comes of these.

    What an op makes is followed as long as its results still have the experts apart.
    """
    marked: dict[str, frozenset[int]] = {}
    found: dict[str, frozenset[str]] = {}
    for op in layer.ops:
        rule = rule_for(op, layer)
        if rule is None:
            continue
        handed = {
            rule.operands[position][dim] for position, name in enumerate(op.operands) for dim in marked.get(name, ())
        }
        kept = {f for f in handed if f and all(f in dims for dims in rule.results)}
        if factors := stacked(op, rule, layer) | kept:
            found[op.name] = factors
            for name, dims in zip(op.results, rule.results, strict=True):
                marked[name] = frozenset(d for d, factor in enumerate(dims) if factor in factors)
    return found


@lru_cache(maxsize=256)
def expert_parameters(layer: LayerClass) -> frozenset[str]:
    """Names of the ops that make of parameters alone what ops with experts read, such as views of biases."""
    made = set(layer.params)
    for op in layer.ops:
        made.update(op.results if op.operands and made.issuperset(op.operands) else ())
    wanted: set[str] = set()
    found: set[str] = set()
    for op in reversed(layer.ops):
        if wanted & {*op.results} and made.issuperset(op.results):
            found.add(op.name)
        if op.name in found or op.name in expert_factors(layer):
            wanted.update(op.operands)
    return frozenset(found)


def expert_counts(layer: LayerClass) -> frozenset[int]:
    """How many experts the layer's products have."""
    counts: set[int] = set()
    for op in layer.ops:
        rule = rule_for(op, layer)
        numbers = stacked(op, rule, layer) if rule else frozenset()
        counts.update(f.extent.fixed for f in (rule.factors if rule else ()) if f.name in numbers)
    return frozenset(counts)
