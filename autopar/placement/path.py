"""The shortest way through all points that need not return (open-loop travelling salesman).

Exact up to `EXACT` points by dynamic programming over subsets (Held and Karp, 1962); beyond that the nearest neighbour
from every point, mended by reversals of pieces (2-opt; Croes, 1958) and by moving pieces elsewhere (Or, 1976).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXACT = 12
STARTS = 8
"""Points that nearest neighbours are followed from."""
LONGEST_PIECE = 3
"""Points that are moved together at most."""


def shortest_path(lengths: Floats) -> tuple[int, ...]:
    """The points (n) in the order of a shortest way, by symmetric lengths (n, n); near the shortest for many points."""
    points = len(lengths)
    if points <= EXACT:
        return _exact(lengths)
    starts = np.linspace(0, points - 1, STARTS).astype(int).tolist()
    return min((mended(_nearest(lengths, s), lengths) for s in dict.fromkeys(starts)), key=lambda p: length(p, lengths))


def length(path: tuple[int, ...], lengths: Floats) -> float:
    """The sum of a way's steps."""
    return float(sum(lengths[a, b] for a, b in pairwise(path)))


def spanning_seconds(lengths: Floats, pieces: int = 1) -> float:
    """The least sum of edges that join all points into so many pieces (Kruskal, 1956): a bound on ways through them."""
    points = len(lengths)
    rows, columns = np.triu_indices(points, 1)
    piece, total, left = list(range(points)), 0.0, points - pieces
    for edge in np.argsort(lengths[rows, columns], kind="stable").tolist():
        one, other = _root(piece, int(rows[edge])), _root(piece, int(columns[edge]))
        if not left:
            break
        if one != other:
            piece[one] = other
            total += float(lengths[rows[edge], columns[edge]])
            left -= 1
    return total


def _root(piece: list[int], point: int) -> int:
    while piece[point] != point:
        piece[point] = piece[piece[point]]
        point = piece[point]
    return point


def _exact(lengths: Floats) -> tuple[int, ...]:
    """`best[s, j]`: the shortest way through the points of the set s that ends in j, `came[s, j]` the point before."""
    points = len(lengths)
    best = np.full((1 << points, points), np.inf)
    came = np.full((1 << points, points), -1)
    best[[1 << j for j in range(points)], range(points)] = 0.0
    for subset in range(1, 1 << points):
        ways = best[subset][:, None] + lengths
        for j in range(points):
            if not subset >> j & 1:
                before = int(ways[:, j].argmin())
                best[subset | 1 << j, j], came[subset | 1 << j, j] = ways[before, j], before
    subset, end = (1 << points) - 1, int(best[-1].argmin())
    path = [end]
    while (before := int(came[subset, end])) >= 0:
        subset, end = subset ^ 1 << end, before
        path.append(end)
    return tuple(path)


def _nearest(lengths: Floats, start: int) -> tuple[int, ...]:
    path, left = [start], set(range(len(lengths))) - {start}
    while left:
        path.append(min(left, key=lambda j: (lengths[path[-1], j], j)))
        left.remove(path[-1])
    return tuple(path)


def mended(path: tuple[int, ...], lengths: Floats) -> tuple[int, ...]:
    """The way made shorter by reversals and moves of pieces until none helps.

    A point that is no length from any other closes the way to a tour.
    """
    points = len(lengths)
    closed = np.zeros((points + 1, points + 1))
    closed[:points, :points] = lengths
    tour = np.array([points, *path])
    while (better := _better(tour, closed)) is not None:
        tour = better
    return tuple(tour[1:].tolist())


def _better(tour: NDArray[np.intp], lengths: Floats) -> NDArray[np.intp] | None:
    """The tour after its best change, None where no change makes it shorter; its first point stays."""
    floor = -1e-12 * float(lengths[tour, np.roll(tour, -1)].sum())
    changes = [_reversal(tour, lengths), *(_move(tour, lengths, n) for n in range(1, LONGEST_PIECE + 1))]
    gain, better = min(changes, key=lambda change: change[0])
    return better if gain < floor else None


def _reversal(tour: NDArray[np.intp], lengths: Floats) -> tuple[float, NDArray[np.intp]]:
    """The best reversal of a piece: points a to b, where (a - 1, b) and (a, b + 1) become neighbours."""
    front, behind = np.roll(tour, 1), np.roll(tour, -1)
    before, after = lengths[front, tour], lengths[tour, behind]
    change = lengths[front[:, None], tour] + lengths[tour[:, None], behind] - before[:, None] - after
    positions = np.arange(len(tour))
    legal = (positions[:, None] > 0) & (positions[:, None] < positions)
    a, b = divmod(int(np.where(legal, change, np.inf).argmin()), len(tour))
    return float(change[a, b]), np.concatenate([tour[:a], tour[a : b + 1][::-1], tour[b + 1 :]])


def _move(tour: NDArray[np.intp], lengths: Floats, size: int) -> tuple[float, NDArray[np.intp]]:
    """The best move of a piece of `size` points that begins at a to behind the point at b."""
    count = len(tour)
    if count < size + 3:
        return np.inf, tour
    starts = np.arange(1, count - size + 1)
    first, last, front, behind = tour[starts], tour[starts + size - 1], tour[starts - 1], tour[(starts + size) % count]
    left = lengths[front, behind] - lengths[front, first] - lengths[last, behind]
    follows = np.roll(tour, -1)
    change = left[:, None] + lengths[tour, first[:, None]] + lengths[last[:, None], follows] - lengths[tour, follows]
    positions = np.arange(count)
    legal = (positions < starts[:, None] - 1) | (positions > starts[:, None] + size - 1)
    row, b = divmod(int(np.where(legal, change, np.inf).argmin()), count)
    a = int(starts[row])
    rest = np.concatenate([tour[:a], tour[a + size :]])
    at = b + 1 if b < a else b + 1 - size
    return float(change[row, b]), np.concatenate([rest[:at], tour[a : a + size], rest[at:]])
