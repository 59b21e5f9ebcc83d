"""Which of the keys a search asks for are worth timing: heavy ops at their shapes, of all else a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf, prod
from typing import TypeAlias, TypeVar

from autopar.cost.passes import tensor_arguments
from autopar.cost.work import is_heavy
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.fit import spread

HEAVY_LIMIT = 800
"""Most shapes of heavy ops (products, attention, losses, embeddings, norms) that are timed one by one."""

POINTS = 4
"""Sizes of a kind at which heavy ops beyond the limit are timed at least."""

SIZES_RATIO, ENDS_RATIO = 3.0, 1.2
"""Ratio of sizes (elements) from which a light op is timed anew, between known sizes and outside of them."""

LONGEST_S = 0.2
"""Ops predicted to take longer are not timed, but priced on the curve of their kind."""

BYTES_RATIO = 8
"""Ratio between neighbouring sizes at which collectives are timed."""

Kind: TypeAlias = tuple[object, ...]
Key = TypeVar("Key", OpKey, CollectiveKey)


def kind_of(key: OpKey) -> Kind:
    """Ops that one curve describes: of one target and dtype, with gradients for the same operands.

    Where operands are broadcast the backward adds gradients up, where all have one shape it need not: other curves.
    """
    operands = tensor_arguments(key)
    one_shape = len({operand.shape for operand in operands}) <= 1
    flows = tuple(operand.requires_grad for operand in operands[:3])
    return (key.target, operands[0].dtype if operands else "", one_shape, *flows)


def group_of(key: CollectiveKey) -> Kind:
    """Collectives that one curve describes: of one kind over groups of one shape."""
    return (key.kind, key.ranks, key.stride)


def grouped(keys: Sequence[Key], by: Callable[[Key], Kind]) -> dict[Kind, list[int]]:
    """Positions of keys of each kind."""
    found: dict[Kind, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(by(key), []).append(i)
    return found


def ops_to_time(keys: Sequence[OpKey], predicted_s: Sequence[float], timed: Collection[OpKey]) -> list[OpKey]:
    """Of distinct `keys`, not timed yet, those to time now.

    Heavy ops at every shape while these are few, else as many of each kind as there is room for; of all others the
    smallest and the largest size asked for, and sizes in between that lie far apart.
    """
    seconds = {k: s for k, s in zip(keys, predicted_s, strict=True) if s <= LONGEST_S and k not in timed}
    known = grouped(list(timed), kind_of)
    heavy = [key for key in seconds if is_heavy(key.target)]
    room = HEAVY_LIMIT - sum(is_heavy(key.target) for key in timed)
    if len(heavy) <= room:
        chosen, rest = heavy, [key for key in seconds if not is_heavy(key.target)]
    else:
        chosen, rest = [], list(seconds)
    share = max(POINTS, HEAVY_LIMIT // max(1, len(grouped(heavy, kind_of))))
    before = list(timed)
    for kind, members in grouped(rest, kind_of).items():
        mine, there = [rest[i] for i in members], known.get(kind, ())
        if is_heavy(mine[0].target):
            missing = share - len(there)
            chosen = chosen + [mine[i] for i in spread([seconds[key] for key in mine], max(0, missing))]
        else:
            chosen = chosen + _far_apart(mine, [elements_of(before[i]) for i in there])
    return chosen


def elements_of(key: OpKey) -> int:
    """Elements of the largest operand, 1 where there is none."""
    return max((prod(operand.shape) for operand in tensor_arguments(key)), default=1)


def _far_apart(keys: Sequence[OpKey], known: Sequence[int]) -> list[OpKey]:
    """Of keys of one kind those that curves need: the ends, and then what lies far from every size there is."""
    ordered = sorted(keys, key=elements_of)
    sizes, chosen = [max(1, size) for size in known], []
    for key in dict.fromkeys([ordered[-1], ordered[0], *ordered]):
        size = max(1, elements_of(key))
        outside = not min(sizes, default=size + 1) <= size <= max(sizes, default=0)
        nearest = min((max(size, s) / min(size, s) for s in sizes), default=inf)
        if nearest > (ENDS_RATIO if outside else SIZES_RATIO):
            sizes.append(size)
            chosen.append(key)
    return chosen


def collectives_to_time(keys: Sequence[CollectiveKey], timed: Collection[CollectiveKey]) -> list[CollectiveKey]:
    """A ladder of sizes around those of `keys`, for each kind of group, as far as not timed yet."""
    wanted = dict[CollectiveKey, None]()
    for key in keys:
        if key.ranks > 1 and key.bytes > 0:
            rung = _rung(key.bytes)
            for size in (BYTES_RATIO**rung, BYTES_RATIO ** (rung + 1)):
                wanted[CollectiveKey(key.kind, max(size, 4 * key.ranks), key.ranks, key.stride)] = None
    return [key for key in wanted if key not in timed]


def _rung(size_bytes: int) -> int:
    """The rung of the ladder of sizes at or just below `size_bytes`."""
    rung = 0
    while BYTES_RATIO ** (rung + 1) <= size_bytes:
        rung += 1
    return rung
