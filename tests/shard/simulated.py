"""Ranks simulated in one process: tensors by mesh coordinates, laid out and moved by the plain meaning of the words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from autopar.graph import PARTIAL, Layout
from autopar.shard.program import Move

Coordinates = tuple[int, ...]
Shards = dict[Coordinates, np.ndarray]


def ranks(sizes: tuple[int, ...]) -> Iterator[Coordinates]:
    """Coordinates of all ranks of a mesh."""
    return product(*map(range, sizes))


def shard_of(whole: np.ndarray, layout: Layout, sizes: tuple[int, ...], rank: Coordinates) -> np.ndarray:
    """What `rank` holds of `whole`: splits applied axis by axis, so that the first axis of a dim is outermost."""
    for axis, placement in enumerate(layout):
        if placement >= 0:
            whole = np.split(whole, sizes[axis], axis=placement)[rank[axis]]
    return whole


def distribute(whole: np.ndarray, layout: Layout, sizes: tuple[int, ...], rng: np.random.Generator) -> Shards:
    """Lay out `whole`; along partial axes it is cut into random integer summands."""
    partial = [a for a, p in enumerate(layout) if p == PARTIAL]
    parts = {c: rng.integers(-9, 9, whole.shape).astype(float) for c in ranks(tuple(sizes[a] for a in partial))}
    last = next(reversed(parts))
    parts[last] = whole - sum(v for c, v in parts.items() if c != last)
    return {
        rank: shard_of(parts[tuple(rank[a] for a in partial)], layout, sizes, rank).copy() for rank in ranks(sizes)
    }


def mistakes(shards: Shards, whole: np.ndarray, layout: Layout, sizes: tuple[int, ...]) -> list[Coordinates]:
    """Ranks whose shard (summed over the partial axes) is not what `layout` says of `whole`."""
    partial = {a for a, p in enumerate(layout) if p == PARTIAL}

    def same_sum(rank: Coordinates) -> bool:
        group = [r for r in ranks(sizes) if all(r[a] == rank[a] for a in range(len(sizes)) if a not in partial)]
        if len({shards[r].shape for r in group}) > 1:
            return False
        total = sum(shards[r] for r in group)
        wanted = shard_of(whole, layout, sizes, rank)
        return total.shape == wanted.shape and bool(np.allclose(total, wanted))

    return [rank for rank in ranks(sizes) if not same_sum(rank)]


def run_move(move: Move, shards: Shards, sizes: tuple[int, ...]) -> Shards:
    """The shards after `move`, each group being the ranks that differ on its axes only, in row-major order."""
    result: Shards = {}
    for rank in shards:
        group = [r for r in ranks(sizes) if all(r[a] == rank[a] for a in range(len(sizes)) if a not in move.axes)]
        result[rank] = _MOVES[move.kind](move, [shards[r] for r in group], group.index(rank))
    return result


def _pad(move: Move, held: list[np.ndarray], index: int) -> np.ndarray:
    pieces = [np.zeros_like(held[index])] * len(held)
    pieces[index] = held[index]
    return np.concatenate(pieces, move.dim)


_MOVES: dict[str, Callable[[Move, list[np.ndarray], int], np.ndarray]] = {
    "all_reduce": lambda m, held, i: sum(held),
    "all_gather": lambda m, held, i: np.concatenate(held, m.dim),
    "reduce_scatter": lambda m, held, i: np.split(sum(held), len(held), m.dim)[i],
    "all_to_all": lambda m, held, i: np.concatenate([np.split(h, len(held), m.to_dim)[i] for h in held], m.dim),
    "slice": lambda m, held, i: np.split(held[i], len(held), m.dim)[i],
    "pad": _pad,
    "divide": lambda m, held, i: held[i] / len(held),
}
