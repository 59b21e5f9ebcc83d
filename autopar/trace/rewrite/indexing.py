"""Advanced indexing by the number of every sample, in order, is a view or a gather: samples stay apart.

Masks written for one position at a time and vectorised read a padding mask so: `mask[samples, keys]`, with all samples
and all keys, each along a dim of its own. Classifiers pick one position of each sample: `x[samples, position]`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.graph import Argument, Extent, Op, Ref, TensorSpec
from autopar.trace.flat import Flat, Item
from autopar.trace.known.constants import Constants


def without_identity_indexing(flat: Flat, known: Constants) -> Flat:
    """`aten.index` with the numbers of all elements of every dim, in order, becomes a view; of dim 0, a gather."""
    values = dict(flat.values)
    items: list[Item] = []
    for item in flat.items:
        viewed = _viewed(item, values, known)
        items += _gathered(viewed, values, known) if isinstance(viewed, Op) else [viewed]
    return replace(flat, items=tuple(items), values=values)


def _gathered(op: Op, values: dict[str, TensorSpec], known: Constants) -> list[Op]:
    """`x[samples, positions]` (rows, ...) as a gather along dim 1 of x, at positions (samples) or (samples, k)."""
    indices = op.args[1] if op.target == "aten.index.Tensor" else ()
    if not isinstance(indices, tuple) or len(indices) != 2 or not all(isinstance(i, Ref) for i in indices):
        return [op]
    source, result = values[op.operands[0]], values[op.results[0]]
    numbers, positions = op.operands[1:]
    spec, (samples, length, *rest) = values[positions], source.shape
    if not _counts(numbers, samples, values, known) or spec.shape[:1] != (samples,) or len(spec.shape) > 2:
        return [op]
    if values[numbers].shape[:1] != (samples,) or len(values[numbers].shape) > len(spec.shape):
        return [op]
    count = spec.shape[1] if spec.shape[1:] else Extent(0, 1)
    narrow = (samples, count, *[Extent(0, 1)] * len(rest))
    wide = (samples, count, *rest)
    steps: list[Op] = []

    def add(word: str, target: str, source: str, args: tuple[Argument, ...], spec: TensorSpec) -> str:
        name = f"{op.results[0]}@{word}"
        values[name] = spec
        steps.append(Op(name, target, (Ref(source), *args), (), (name,), (None,), module=op.module))
        return name

    inside = add("inside", "aten.remainder.Scalar", positions, (length.fixed,), spec)  # from the end where negative
    apart = add("apart", "aten.view.default", inside, (_sizes(narrow),), replace(spec, shape=narrow))
    spread = add("spread", "aten.expand.default", apart, (_sizes(wide),), replace(spec, shape=wide))
    picked = add("picked", "aten.gather.default", op.operands[0], (1, Ref(spread)), replace(source, shape=wide))
    view = Op(op.results[0], "aten.view.default", (Ref(picked), _sizes(result.shape)), (), op.results, (None,),
              module=op.module)  # fmt: skip
    return [*steps, view]


def _sizes(shape: tuple[Extent, ...]) -> tuple[Argument, ...]:
    return tuple(e if e.is_batch else e.fixed for e in shape)


def _viewed(item: Item, values: dict[str, TensorSpec], known: Constants) -> Item:
    if not isinstance(item, Op) or item.target != "aten.index.Tensor" or not _is_identity(item, values, known):
        return item
    return replace(item, target="aten.view.default", args=(item.args[0], _sizes(values[item.results[0]].shape)))


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
