"""Advanced indexing that picks every element in order is a view.

Masks written for one position at a time and vectorised read a padding mask so: `mask[samples, keys]`, with all samples
and all keys, each along a dim of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.graph import Extent, Op, Ref, TensorSpec
from autopar.trace.constants import Constants
from autopar.trace.flat import Flat, Item


def without_identity_indexing(flat: Flat, known: Constants) -> Flat:
    """`aten.index` with the numbers of all elements of every dim, in order, becomes `aten.view`."""
    return replace(flat, items=tuple(_viewed(item, flat.values, known) for item in flat.items))


def _viewed(item: Item, values: dict[str, TensorSpec], known: Constants) -> Item:
    if not isinstance(item, Op) or item.target != "aten.index.Tensor" or not _is_identity(item, values, known):
        return item
    shape = tuple(e if e.is_batch else e.fixed for e in values[item.results[0]].shape)
    return replace(item, target="aten.view.default", args=(item.args[0], shape))


def _is_identity(op: Op, values: dict[str, TensorSpec], known: Constants) -> bool:
    source, indices = values[op.operands[0]], op.args[1]
    result = values[op.results[0]].shape
    if not isinstance(indices, tuple) or len(indices) != len(source.shape):
        return False
    places = []
    for index, length in zip(indices, source.shape, strict=True):
        if not isinstance(index, Ref) or not _counts(index.name, length, values, known):
            return False
        shape = values[index.name].shape
        places += [d - len(shape) for d, e in enumerate(shape) if e != Extent(0, 1)]
    kept = [d - len(result) for d, e in enumerate(result) if e != Extent(0, 1)]
    return places == kept


def _counts(name: str, length: Extent, values: dict[str, TensorSpec], known: Constants) -> bool:
    """Whether the constant is 0, 1, ..., `length` - 1 along one dim."""
    long = [e for e in values[name].shape if e != Extent(0, 1)]
    if long != [length] or name not in known.makers:
        return False
    found = [known.value(name, batch) for batch in (1, 2)]
    return all(t is not None and torch.equal(t.flatten(), torch.arange(t.numel())) for t in found)
