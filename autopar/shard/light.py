"""What of a layer is cheap to make again in the backward pass, so that the least bytes are kept: a minimum cut.

Of what autograd keeps, much is made from little by elementwise ops and norms. Values are kept so that all else that
autograd wants can be made from them by such ops alone, and that they are the fewest bytes: the minimum cut between what
takes real work to make and what is wanted (T. Chen et al., "Training deep nets with sublinear memory cost", 2016, for
the trade; the cut is that of the rematerialising partitioner of PyTorch's AOTAutograd, by H. He). Of equal cuts it is
the one by which least is made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache

from autopar.graph import LayerClass, Op
from autopar.shard.table import LINEAR_OPS, POINTWISE

CHEAP = frozenset(
    f"""
    {POINTWISE} {LINEAR_OPS} layer_norm native_layer_norm rms_norm group_norm softmax _softmax _safe_softmax log_softmax
    _log_softmax glu cat stack repeat var std amax amin dropout native_dropout
""".split()
)
"""Ops whose time is that of reading and writing their operands and results."""

Node = tuple[str, str]
"""A value in front of ("in") or behind ("out") the choice of keeping it."""


@lru_cache(maxsize=256)
def made_again(layer: LayerClass) -> frozenset[str]:
    """Names of the ops, views apart, whose results are not kept but made again."""
    ends = {layer.root[name] for name in layer.outputs}
    cheap = {op.name for op in layer.ops if _is_cheap(op) and ends.isdisjoint(layer.root[r] for r in op.results)}
    behind = _behind_cut(layer, cheap)
    return frozenset(
        op.name for op in layer.ops if op.name in cheap and not is_view(op) and not behind.isdisjoint(_made(layer, op))
    )


def _behind_cut(layer: LayerClass, cheap: Collection[str]) -> set[str]:
    """Values on the side of what is wanted: to be made again."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(("work", "wanted"))
    for name in {layer.root[n] for n in (*layer.inputs, *layer.params, *layer.buffers)}:
        graph.add_edge("work", ("in", name))
    for op in layer.ops:
        made, wanted = _made(layer, op), {layer.root[name] for name in op.saved.values}
        if op.name in cheap:
            wanted |= made - {layer.root[r] for r in op.results}
            read = {layer.root[name] for name in op.operands}
            graph.add_edges_from((("out", r), ("in", m)) for m in made for r in read - made)
        elif not is_view(op):
            graph.add_edges_from(("work", ("in", m)) for m in made)
        graph.add_edges_from((("out", name), "wanted") for name in wanted)
    for _, name in {node for node in graph if isinstance(node, tuple)}:
        graph.add_edge(("in", name), ("out", name), capacity=_bytes(layer, name))
    _, (_, behind) = networkx.minimum_cut(graph, "work", "wanted")  # of equal cuts the one nearest to what is wanted
    return {name for kind, name in (node for node in behind if isinstance(node, tuple)) if kind == "in"}


def _made(layer: LayerClass, op: Op) -> set[str]:
    """Storages that an op makes, and one for what it keeps besides values."""
    made = {layer.root[r] for r, alias in zip(op.results, op.alias_of, strict=True) if not alias}
    return made | ({f"{op.name} inside"} if op.saved.extra and not is_view(op) else set())


def _bytes(layer: LayerClass, name: str) -> int:
    """Bytes of a storage for one sample; none of what is there anyway."""
    if name in layer.params or name in layer.buffers:
        return 0
    if name in layer.values:
        return layer.values[name].bytes_at(1)
    op = next(op for op in layer.ops if f"{op.name} inside" == name)
    return sum(spec.bytes_at(1) for spec in op.saved.extra)


def is_view(op: Op) -> bool:
    """Whether all results of an op lie in its operands' storages."""
    return all(op.alias_of)


def _is_cheap(op: Op) -> bool:
    return op.target.split(".")[1] in CHEAP


def connected(layer: LayerClass, ops: Collection[str]) -> Iterator[frozenset[str]]:
    """The ops in groups that hand values to one another, each with the views between its ops.

    Ops that gradients flow through are apart from others, whose results nobody shall take for more.
    """
    flowing = {op.name for op in layer.ops if any(layer.values[r].requires_grad for r in op.results)}
    for own in (flowing.intersection(ops), {*ops} - flowing):
        for group in _touching(layer, own):
            yield frozenset(group | _views_between(layer, group))


def _touching(layer: LayerClass, ops: Collection[str]) -> list[set[str]]:
    """The ops in groups that hand values to one another."""
    groups: list[set[str]] = []
    made_by: dict[str, str] = {}
    for op in layer.ops:
        if op.name not in ops:
            continue
        before = {made_by[root] for root in (layer.root[n] for n in op.operands) if root in made_by}
        touching = [group for group in groups if group & before]
        groups = [group for group in groups if not group & before] + [{op.name}.union(*touching)]
        made_by |= dict.fromkeys((layer.root[r] for r in op.results), op.name)
    return groups


def _views_between(layer: LayerClass, group: Collection[str]) -> set[str]:
    """Views that lead from ops of the group to others."""
    made = {layer.root[r] for op in layer.ops if op.name in group for r in op.results}
    found: set[str] = set()
    for op in reversed(layer.ops):
        readers = {reader.name for r in op.results for reader in layer.consumers[r]}
        if is_view(op) and layer.root[op.results[0]] in made and not readers.isdisjoint({*group, *found}):
            found.add(op.name)
    return found
