"""Which of the keys a search asks for are worth timing: heavy ops at their shapes, of all else a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, TypeVar

from autopar.cost.work import is_heavy, tensor_arguments
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.fit import spread

HEAVY_LIMIT = 300
"""Most shapes of heavy ops (products, attention, losses, embeddings, norms) that are timed one by one."""

POINTS = 4
"""Sizes of a kind at which light ops are timed; of heavy ones beyond the limit."""

LONGEST_S = 0.2
"""Ops predicted to take longer are not timed, but priced on the curve of their kind."""

BYTES_RATIO = 8
"""Ratio between neighbouring sizes at which collectives are timed."""

Kind: TypeAlias = tuple[object, ...]
Key = TypeVar("Key", OpKey, CollectiveKey)


def kind_of(key: OpKey) -> Kind:
    """Ops that one curve describes: of one target and dtype, with gradients for the same operands."""
    operands = tensor_arguments(key)
    return (key.target, operands[0].dtype if operands else "", *(o.requires_grad for o in operands[:3]))


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

    Heavy ops at every shape while these are few, else as many of each kind as there is room for; of all others a few
    sizes of each kind, from the smallest to the largest asked for.
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
    for kind, members in grouped(rest, kind_of).items():
        mine = [rest[i] for i in members]
        missing = (share if is_heavy(mine[0].target) else POINTS) - len(known.get(kind, ()))
        if missing > 0:
            chosen = chosen + [mine[i] for i in spread([seconds[key] for key in mine], missing)]
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
