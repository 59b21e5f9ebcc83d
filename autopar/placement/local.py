"""Placements by exchange: places of two groups change sides, and the way through the groups is found anew, in turns.

An iterated local search (Lourenco, Martin, Stuetzle, 2003) from several starts, over classes of places. Small problems
are tried out whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

from autopar.placement.bounds import lower_bound
from autopar.placement.classes import Classes, Mix
from autopar.placement.problem import Groups, Placement, PlacementProblem, placed

EXHAUSTIVE = 9
"""Places up to which all placements are tried."""
EFFORT = 50_000
"""Exchanges tried at most."""
ROUNDS = 30
"""Times that a placement is shaken and mended."""
SHAKEN = 3
"""Exchanges of a shake."""
LESS = 1 - 1e-12
"""What counts as less: sums differ by rounding."""

Mixes = tuple[Mix, ...]


def place(problem: PlacementProblem, rounds: int = ROUNDS, effort: int = EFFORT, seed: int = 0) -> Placement:
    """A placement of low cost; the least where there are at most `EXHAUSTIVE` places. The same for the same seed.

    At most `effort` exchanges are tried, in so many rounds at most.
    """
    classes = Classes(problem)
    start = tuple(map(classes.mix, problem.start))
    if len(set(classes.of_place)) == 1:
        found = start
    elif problem.places <= EXHAUSTIVE:
        found = min(map(classes.ordered, _all_mixes(classes, start)), key=classes.cost_s)
    else:
        found = _Exchange(classes, Random(seed), iter(range(effort))).searched(start, rounds)
    return placed(problem, classes.groups(found), lower_bound(problem))


def _all_mixes(classes: Classes, start: Mixes) -> Iterator[Mixes]:
    """Every way to make groups with the kinds of those to begin with."""
    wanted = Counter(map(classes.kinds, start))
    for groups in _groupings(tuple(range(classes.problem.places)), classes.problem.size):
        mixes = tuple(map(classes.mix, groups))
        if Counter(map(classes.kinds, mixes)) == wanted:
            yield mixes


def _groupings(places: tuple[int, ...], size: int) -> Iterator[Groups]:
    """Every way to cut a set into groups of one size; the first group has the first place."""
    if not places:
        yield ()
    for others in combinations(places[1:], size - 1) if places else ():
        left = tuple(p for p in places[1:] if p not in others)
        for rest in _groupings(left, size):
            yield ((places[0], *others), *rest)


@dataclass
class _Exchange:
    """Search by exchange, until nothing is left of the `effort`."""

    classes: Classes
    random: Random
    effort: Iterator[int]

    def searched(self, start: Mixes, rounds: int) -> Mixes:
        """The best of the starts, mended, then shaken and mended so many times."""
        ordered, cost_s = self.classes.ordered, self.classes.cost_s
        best = min((self._mended(ordered(m)) for m in (start, *_other_starts(self.classes, start))), key=cost_s)
        for _ in range(rounds):
            shaken = best
            for _ in range(SHAKEN):
                shaken = next(self._exchanges(shaken), shaken)
            best = min(best, self._mended(ordered(shaken)), key=cost_s)
        return best

    def _mended(self, mixes: Mixes) -> Mixes:
        """Exchange while that helps, and order the groups anew, until neither does."""
        cost_s, best = self.classes.cost_s, self.classes.cost_s(mixes)
        while True:
            better = next((g for g in self._exchanges(mixes) if cost_s(g) < best * LESS), None)
            if better is None:
                better = self.classes.ordered(mixes)
                if cost_s(better) >= best * LESS:
                    return mixes
            mixes, best = better, cost_s(better)

    def _exchanges(self, mixes: Mixes) -> Iterator[Mixes]:
        """The groups after exchanging 1, 2, 4, ... places of a class for those of another one of the same kind."""
        kind, pairs = self.classes.kind, list(combinations(range(len(mixes)), 2))
        self.random.shuffle(pairs)
        for a, b in pairs:
            ways = [(p, q) for p, q in product(dict.fromkeys(mixes[a]), dict.fromkeys(mixes[b])) if p != q]
            self.random.shuffle(ways)
            for p, q in ways:
                most = min(mixes[a].count(p), mixes[b].count(q)) if kind(p) == kind(q) else 0
                for count in (1 << n for n in range(most.bit_length())):
                    if next(self.effort, None) is None:
                        return
                    changed = list(mixes)
                    changed[a], changed[b] = _changed(mixes[a], p, q, count), _changed(mixes[b], q, p, count)
                    yield tuple(changed)


def _other_starts(classes: Classes, start: Mixes) -> Iterator[Mixes]:
    """Where all places are of one kind: those of a class together; or one after another along the stages."""
    if len(set(map(classes.kinds, start))) > 1:
        return
    size, own = classes.problem.size, classes.of_place
    seen: Counter[int] = Counter()
    along = []
    for c in own:
        along.append((c not in classes.near, seen[c], c))
        seen[c] += 1
    for line in (sorted(own), [c for _, _, c in sorted(along)]):
        yield tuple(tuple(sorted(line[at : at + size])) for at in range(0, len(line), size))


def _changed(mix: Mix, old: int, new: int, count: int) -> Mix:
    left = list(mix)
    for _ in range(count):
        left.remove(old)
    return tuple(sorted([*left, *[new] * count]))
