"""Which ops of a layer run again in the backward pass, so that less is kept for it: found on the graph.

`full`: all. `selective`: the cores of attention (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022), whose bytes grow with the square of the sequence. A core is made of products of two values
that gradients flow to (queries by keys, weights by values; a fused attention is one by itself) and of all that lies on
a path between two such products: scaling, mask, softmax, dropout, casts. No product with a parameter is part of it.
`light`: what is cheap to make again (`light.py`); whoever keeps a result of such a region has it made again, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache

from autopar.graph import LayerClass, Op
from autopar.shard.light import connected, is_view, made_again

FUSED = "scaled_dot_product_attention"
PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", FUSED})
"""Ops that can be the product of two activations."""
_OTHER_PRODUCTS = ("linear", "bilinear", "mm", "addmm", "conv", "embedding")


def rerun_regions(layer: LayerClass, recompute: str) -> tuple[frozenset[str], ...]:
    """Names of the ops of each region of a layer under `none`, `light`, `selective` or `full` recomputation."""
    if recompute == "full":
        return (frozenset(op.name for op in layer.ops),)
    return _cores(layer) if recompute == "selective" else _light(layer) if recompute == "light" else ()


def in_order(
    reads: Sequence[Collection[str]], makes: Sequence[Collection[str]], groups: Sequence[Collection[int]]
) -> list[int] | None:
    """The items in an order in which groups are consecutive and all is made before it is read; None if there is none.

    Item i reads the names `reads[i]` and makes `makes[i]`. Outside groups the order is kept but for what a group reads.
    """
    maker = {name: i for i, names in enumerate(makes) for name in names}
    unit_of = {i: tuple(sorted(group)) for group in groups for i in group}
    order: list[int] = []
    opened: set[tuple[int, ...]] = set()
    done: set[int] = set()

    def visit(unit: tuple[int, ...]) -> bool:
        if unit in opened:
            return unit[0] in done
        opened.add(unit)
        for needed in sorted({maker[name] for i in unit for name in reads[i] if name in maker} - set(unit)):
            if needed not in done and not visit(unit_of.get(needed, (needed,))):
                return False
        order.extend(unit)
        done.update(unit)
        return True

    legal = all(visit(unit_of.get(i, (i,))) for i in range(len(reads)))
    return order if legal else None


def _in_one_piece(layer: LayerClass, wanted: Iterable[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """Of the regions wanted those that can run in one piece each: nothing outside lies between their ops."""
    reads, makes = [op.operands for op in layer.ops], [op.results for op in layer.ops]
    number = {op.name: i for i, op in enumerate(layer.ops)}
    found: list[frozenset[str]] = []
    for wish in wanted:
        groups = [[number[name] for name in region] for region in (*found, wish)]
        if in_order(reads, makes, groups) is not None:
            found.append(wish)
    return tuple(found)


@lru_cache(maxsize=256)
def _light(layer: LayerClass) -> tuple[frozenset[str], ...]:
    """What is made again: ops that hand on what isn't kept are together where nothing lies between them."""
    again = made_again(layer)
    found = _in_one_piece(layer, connected(layer, again))
    rest = again.difference(*found)
    return _in_one_piece(layer, (*found, *(frozenset({name}) for name in sorted(rest))))


@lru_cache(maxsize=256)
def _cores(layer: LayerClass) -> tuple[frozenset[str], ...]:
    """The cores that can run in one piece."""
    return _in_one_piece(layer, (_with_expansions(layer, core) for core in _connected(layer)))


# --- cores of attention -------------------------------------------------------------------------------------------


def _connected(layer: LayerClass) -> Iterator[frozenset[str]]:
    """Products that paths without other products connect, with the ops on these paths."""
    ops, products = layer.ops, activation_products(layer)
    above, below = _reachable(layer, products, forward=True), _reachable(layer, products, forward=False)
    between = {op.name for op in ops if not _is_product(op) and above[op.name] and below[op.name]}
    groups: list[set[str]] = []
    for op in ops:
        if op.name in products or op.name in between:
            joined = {name for name in (*above[op.name], *below[op.name], op.name) if name in products}
            touching = [group for group in groups if group & joined]
            groups = [group for group in groups if not group & joined] + [joined.union(*touching)]
    fused = {op.name for op in ops if _name(op) == FUSED}
    for group in groups:
        if len(group) > 1 or group <= fused:
            yield frozenset(group | {name for name in between if above[name] & group})


@lru_cache(maxsize=256)
def activation_products(layer: LayerClass) -> frozenset[str]:
    """Ops that multiply two values which depend on the layer's inputs and which gradients flow to."""
    dependent = {*layer.inputs}
    for op in layer.ops:
        dependent.update(op.results if dependent & {*op.operands} else ())
    flowing = {name for name in dependent if layer.values[name].requires_grad}
    return frozenset(
        op.name for op in layer.ops if _name(op) in PRODUCTS and sum(name in flowing for name in op.operands) > 1
    )


def _reachable(layer: LayerClass, products: frozenset[str], forward: bool) -> dict[str, frozenset[str]]:
    """For each op the products before it (or behind it) on paths without any other product."""
    found: dict[str, frozenset[str]] = {}
    for op in layer.ops if forward else reversed(layer.ops):
        if forward:
            near = [layer.producer[name] for name in op.operands if name in layer.producer]
        else:
            near = [reader for name in op.results for reader in layer.consumers[name]]
        reached = [found[n.name] | ({n.name} & products) for n in near if n.name in products or not _is_product(n)]
        found[op.name] = frozenset[str]().union(*reached)
    return found


def _with_expansions(layer: LayerClass, core: frozenset[str]) -> frozenset[str]:
    """The core with ops that only it reads and that make more bytes than they read: heads repeated, masks widened."""
    grown = set(core)
    for op in reversed(layer.ops):
        readers = {reader.name for name in op.results for reader in layer.consumers[name]}
        alone = readers and readers <= grown and not {*op.results} & {*layer.outputs}
        if alone and not _is_product(op) and (is_view(op) or _widens(op, layer)):
            grown.add(op.name)
    made = {name for op in layer.ops if op.name in grown and not is_view(op) for name in op.results}
    idle = {op.name for op in layer.ops if is_view(op) and layer.root[op.results[0]] not in made}
    return frozenset(grown - (idle - core))


def _widens(op: Op, layer: LayerClass) -> bool:
    return _bytes(layer, op.operands) < _bytes(layer, op.results)


def _bytes(layer: LayerClass, names: Collection[str]) -> int:
    """Bytes of the storages of values, for one sample."""
    return sum(layer.values[root].bytes_at(1) for root in {layer.root[name] for name in names})


def _is_product(op: Op) -> bool:
    return _name(op) in PRODUCTS or _name(op).startswith(_OTHER_PRODUCTS)


def _name(op: Op) -> str:
    return op.target.split(".")[1]
