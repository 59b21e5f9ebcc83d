"""Factors of reshaping ops, found from the shapes alone: dims whose running products agree belong together."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from autopar.graph import Extent

PROBES = (1009, 2003, 4001)
"""Batches at which products of extents are compared: equal at all three means equal at every batch."""

Dims = list[tuple[int, Extent]]


def view_line(source: tuple[Extent, ...], target: tuple[Extent, ...]) -> str:
    """Factor line of a tensor of shape `source` reshaped to `target`.

    In each group of dims with equal products the outermost dims share a factor (`b s h*d -> b s h d` splits by h,
    `b s h -> b*s h` by b): an outer split keeps shards contiguous, an inner one would not.
    """
    ins, outs = _long(source), _long(target)
    names = (["_"] * len(source), ["_"] * len(target))
    i = j = 0
    for next_i, next_j in _boundaries(ins, outs):
        names[0][ins[i][0]] = names[1][outs[j][0]] = f"d{ins[i][0]}"
        i, j = next_i, next_j
    return f"{' '.join(names[0])} -> {' '.join(names[1])}"


def _long(shape: tuple[Extent, ...]) -> Dims:
    return [(i, e) for i, e in enumerate(shape) if e != Extent(0, 1)]


def _boundaries(source: Dims, target: Dims) -> Iterator[tuple[int, int]]:
    """Pairs of counts of leading dims with equal products, increasing."""
    counts = {_product(target[:n]): n for n in range(1, len(target) + 1)}
    for n in range(1, len(source) + 1):
        if (product := _product(source[:n])) in counts:
            yield n, counts[product]


def _product(dims: Dims) -> tuple[int, ...]:
    return tuple(prod(e.at(batch) for _, e in dims) for batch in PROBES)
