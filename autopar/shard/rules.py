"""Factor rules of ops: which factors each mesh axis may split, and the layouts that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from itertools import product
from math import prod

from autopar.graph import BROADCAST, PARTIAL, REPLICATE, Extent, LayerClass, Layout, Op, TensorSpec, is_dealt, part_of
from autopar.shard.factors import LINEAR, Factor, OpRule
from autopar.shard.inner import inner_collectives, inner_collectives_backward
from autopar.shard.notation import bind, parse
from autopar.shard.structured import Site
from autopar.shard.table import is_linear, line_of
from autopar.shard.table import register as _register
from autopar.trace.separable import judge_by

__all__ = [
    "LINEAR", "Factor", "OpRule", "assignments", "inner_collectives", "inner_collectives_backward", "layouts_of",
    "register", "rule_for",
]  # fmt: skip

Layouts = tuple[Layout, ...]


def rule_for(op: Op, layer: LayerClass) -> OpRule | None:
    """The rule of an op of `layer`, or None when there is none: the op can then only be replicated."""
    return _rule_in(op, layer)


@lru_cache(maxsize=1 << 14)
def _rule_in(op: Op, layer: LayerClass) -> OpRule | None:
    return _rule(op, tuple(layer.values[n] for n in op.operands), tuple(layer.values[n] for n in op.results))


@cache
def _rule(op: Op, operands: tuple[TensorSpec, ...], results: tuple[TensorSpec, ...]) -> OpRule | None:
    site = Site(op, operands, results)
    text = line_of(site)
    if text is None:
        return None
    return bind(parse(text), operands, results, linear=is_linear(site))


def register(target: str, line: str) -> None:
    """Give the op `target` (`mylib::op`) the rule `line`; raises ConfigError when either can't be read."""
    judge_by(_register(target, line), keeps_apart)
    _rule.cache_clear()
    _rule_in.cache_clear()


def keeps_apart(op: Op, values: Mapping[str, TensorSpec]) -> bool:
    """Whether by its rule an op does to each sample what it does to it alone.

    So it is where one factor stands for the samples in all operands and results that have any, and needs no kernel.
    """
    operands, results = (tuple(values[n] for n in names) for names in (op.operands, op.results))
    rule = _rule(op, operands, results)
    if rule is None:
        return False
    pairs = zip((*operands, *results), (*rule.operands, *rule.results), strict=True)
    samples = {dims[spec.batch_dim] for spec, dims in pairs if spec.batch_dim is not None}
    return len(samples) == 1 and not samples & {"", *rule.kernels}


def assignments(
    rule: OpRule, op: Op, layer: LayerClass, axis_sizes: tuple[int, ...], batch: int
) -> tuple[tuple[str, ...], ...]:
    """Every legal choice of the factor that each mesh axis splits, '' = none first, at a global microbatch of `batch`.

    A factor's extent must divide by the product of the sizes of all axes that split it, or count at least that many.
    Results that are no numbers (bool) are never left partial.
    """
    numbers = all(layer.values[name].dtype != "bool" for name in op.results)
    summed = {f.name for f in rule.factors if any(_result(rule, r, f.name) == PARTIAL for r in rule.results)}
    split = tuple(f for f in rule.factors if numbers or f.name not in summed)
    return _combinations((Factor("", Extent(0)), *split), rule.solid, axis_sizes, batch)


@cache
def _combinations(
    factors: tuple[Factor, ...], solid: frozenset[str], axis_sizes: tuple[int, ...], batch: int
) -> tuple[tuple[str, ...], ...]:
    extents = {f.name: f.extent for f in factors}
    found: list[tuple[str, ...]] = [()]
    for _ in axis_sizes:
        longer = [(*chosen, name) for chosen in found for name in extents]
        found = [c for c in longer if _legal(extents[c[-1]], c[-1] in solid, batch, _split_by(c, axis_sizes))]
    return tuple(found)


def _split_by(chosen: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the axes that split the same factor as the last one chosen for."""
    return tuple(size for name, size in zip(chosen, sizes, strict=False) if name == chosen[-1])


def _legal(extent: Extent, solid: bool, batch: int, sizes: tuple[int, ...]) -> bool:
    """Whether axes of `sizes` may split a factor."""
    return is_dealt(extent, batch, prod(sizes)) and (not solid or _reaches_all(extent, batch, sizes))


@lru_cache(maxsize=1 << 14)
def _reaches_all(extent: Extent, batch: int, sizes: tuple[int, ...]) -> bool:
    """Whether every rank of axes of `sizes` has something: of 7 over 2 x 3 the first three have 2, 2 and 0."""
    return all(part_of(extent, batch, sizes, place)[1] for place in product(*map(range, sizes)))


def layouts_of(rule: OpRule, op: Op, layer: LayerClass, factors: tuple[str, ...]) -> tuple[Layouts, Layouts]:
    """Layouts of the op's operands (one each, as in `op.operands`) and results when axis i splits `factors[i]`."""
    placements = _placements(rule, tuple(layer.values[name].requires_grad for name in op.operands))
    by_tensor = list(zip(*(placements[f] for f in factors), strict=True)) if factors else [()] * len(placements[""])
    return tuple(by_tensor[: len(op.operands)]), tuple(by_tensor[len(op.operands) :])


@cache
def _placements(rule: OpRule, flows: tuple[bool, ...]) -> dict[str, tuple[int, ...]]:
    """For each factor the placements of all operands, `flows` saying which carry gradients, and results."""
    return {
        f: (*(_operand(rule, i, f, flow) for i, flow in enumerate(flows)), *(_result(rule, r, f) for r in rule.results))
        for f in ("", *(factor.name for factor in rule.factors))
    }


def _operand(rule: OpRule, index: int, factor: str, requires_grad: bool) -> int:
    dims = rule.operands[index]
    if not factor:
        return REPLICATE
    if factor == LINEAR:
        return PARTIAL
    if factor in dims:
        return dims.index(factor)
    if index in rule.added and any(_result(rule, r, factor) == PARTIAL for r in rule.results):
        return PARTIAL
    return BROADCAST if requires_grad else REPLICATE


def _result(rule: OpRule, dims: Iterable[str], factor: str) -> int:
    if not factor:
        return REPLICATE
    if factor == LINEAR:
        return PARTIAL
    where = list(dims)
    if factor in where:
        return where.index(factor)
    return REPLICATE if factor in rule.whole else PARTIAL
