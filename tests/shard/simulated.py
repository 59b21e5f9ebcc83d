"""Ranks simulated in one process: tensors by mesh coordinates, laid out and moved by the plain meaning of the words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from autopar.graph import PARTIAL, Layout
from autopar.shard.program import Move

Coordinates = tuple[int, ...]
Shards = dict[Coordinates, np.ndarray]


def ranks(sizes: tuple[int, ...]) -> Iterator[Coordinates]:
    """Coordinates of all ranks of a mesh."""
    return product(*map(range, sizes))


def parts_of(whole: np.ndarray, sizes: Coordinates, dim: int) -> list[np.ndarray]:
    """Parts along a dim over axes of `sizes`, the first one outermost.

    Each axis cuts into equal parts, of which the last ones are shorter or empty where it does not divide.
    """
    if not sizes:
        return [whole]
    part = -(-whole.shape[dim] // sizes[0])
    cuts = [min(part * i, whole.shape[dim]) for i in range(1, sizes[0])]
    return [inner for outer in np.split(whole, cuts, axis=dim) for inner in parts_of(outer, sizes[1:], dim)]


def shard_of(whole: np.ndarray, layout: Layout, sizes: tuple[int, ...], rank: Coordinates) -> np.ndarray:
    """What `rank` holds of `whole`: splits applied axis by axis, so that the first axis of a dim is outermost."""
    for axis, placement in enumerate(layout):
        if placement >= 0:
            whole = parts_of(whole, sizes[axis : axis + 1], placement)[rank[axis]]
    return whole


def distribute(whole: np.ndarray, layout: Layout, sizes: tuple[int, ...], rng: np.random.Generator) -> Shards:
    """Lay out `whole`; along partial axes it is cut into random integer summands."""
    partial = [a for a, p in enumerate(layout) if p == PARTIAL]
    parts = {c: rng.integers(-9, 9, whole.shape).astype(float) for c in ranks(tuple(sizes[a] for a in partial))}
    last = next(reversed(parts))
    parts[last] = whole - sum(v for c, v in parts.items() if c != last)
    return {rank: shard_of(parts[tuple(rank[a] for a in partial)], layout, sizes, rank).copy() for rank in ranks(sizes)}


def mistakes(shards: Shards, whole: np.ndarray, layout: Layout, sizes: tuple[int, ...]) -> list[Coordinates]:
    """Ranks whose shard (summed over the partial axes) is not what `layout` says of `whole`."""
    partial = {a for a, p in enumerate(layout) if p == PARTIAL}

    def same_sum(rank: Coordinates) -> bool:
        group = [r for r in ranks(sizes) if all(r[a] == rank[a] for a in range(len(sizes)) if a not in partial)]
        if len({shards[r].shape for r in group}) > 1:
            return False
        total = np.sum([shards[r] for r in group], axis=0)
        wanted = shard_of(whole, layout, sizes, rank)
        return total.shape == wanted.shape and bool(np.allclose(total, wanted))

    return [rank for rank in ranks(sizes) if not same_sum(rank)]


def run_move(move: Move, shards: Shards, sizes: tuple[int, ...]) -> Shards:
    """The shards after `move`, each group being the ranks that differ on its axes only, in row-major order."""
    result: Shards = {}
    for rank in shards:
        group = [r for r in ranks(sizes) if all(r[a] == rank[a] for a in range(len(sizes)) if a not in move.axes)]
        result[rank] = _moved(move, [shards[r] for r in group], group.index(rank), tuple(sizes[a] for a in move.axes))
    return result


def _moved(move: Move, held: list[np.ndarray], index: int, sizes: Coordinates) -> np.ndarray:
    """What the rank `index` of a group over axes of `sizes` has after `move`, its ranks holding `held`."""
    mine = held[index]
    match move.kind:
        case "all_reduce":
            return np.sum(held, axis=0)  # type: ignore[no-any-return]
        case "all_gather":
            return np.concatenate(held, move.dim)
        case "reduce_scatter":
            return parts_of(np.sum(held, axis=0), sizes, move.dim)[index]
        case "all_to_all":
            return np.concatenate([parts_of(h, sizes, move.to_dim)[index] for h in held], move.dim)
        case "slice":
            return parts_of(mine, sizes, move.dim)[index]
        case "divide":
            return mine / len(held)
        case "pad":
            return np.concatenate([h if i == index else np.zeros_like(h) for i, h in enumerate(held)], move.dim)
