"""Exact minimum of a label graph by min-plus variable elimination (non-serial dynamic programming).

U. Bertele, F. Brioschi: Nonserial Dynamic Programming, 1972; R. Dechter: Bucket elimination, 1999. Labels that a table
can't tell apart share one entry of it (cost tables of layouts have few distinct rows), and no back pointers are
stored: decoding takes each minimum again, at the labels of the neighbours, which costs one row a variable.

In which order variables go, and which labels share an entry, follows from the structure alone: an `Order` is found
once and minimises any costs of that structure.

Where a table would be too large, the costs that touch the variable are dealt into groups whose tables are not, and each
group takes a minimum of its own (R. Dechter, I. Rish: Mini-buckets, 2003). The result is then a lower bound, and what
is decoded a good labelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from autopar.engine.errors import ProblemError, TooWide
from autopar.engine.label_graph import Costs, LabelGraph, Labels, classes_of, equal_slices

MAX_ENTRIES = 1 << 25
"""Largest table (256 MiB of float64) that elimination may make unless told otherwise."""
CHUNK_ENTRIES = 1 << 15
"""Entries worked on at once: they stay in the processor's cache."""

Scope: TypeAlias = tuple[int, ...]
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Shape:
    """The variables of a cost table and, for each, the entry that a label has in it: `maps[a][label]`."""

    scope: Scope
    maps: tuple[Labels, ...]

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """Lengths of the table."""
        return tuple(int(m.max(initial=-1)) + 1 for m in self.maps)

    @cached_property
    def listed(self) -> tuple[list[int], ...]:
        """The maps as lists."""
        return tuple(m.tolist() for m in self.maps)

    def map_of(self, variable: int) -> Labels:
        """The entry of each label of `variable`."""
        return self.maps[self.scope.index(variable)]


@dataclass(frozen=True, eq=False)
class Factor:
    """A cost over the variables of `shape`: `table[k, maps[0][label_0], maps[1][label_1], ...]`, k from K or 1."""

    shape: Shape
    table: Costs

    def at(self, ks: Labels, labels: Labels, free: int) -> Costs:
        """Costs (N, L_free) of the labels of `free` in scenarios `ks` (N,), the others at `labels` (N, V)."""
        shape = self.shape
        rows = ks[:, None] if len(self.table) > 1 else np.zeros((len(ks), 1), dtype=np.intp)
        index = [
            m[None, :] if v == free else m[labels[:, v]][:, None] for v, m in zip(shape.scope, shape.maps, strict=True)
        ]
        found: Costs = self.table[(rows, *index)]
        return found


@dataclass(frozen=True, eq=False)
class Elimination:
    """The minimum `table` (K, *L_keep) over the kept variables; inf where no legal labelling exists.

    It is a lower bound of the minimum where not `exact`.
    """

    table: Costs
    sizes: tuple[int, ...]
    keep: Scope
    steps: tuple[tuple[int, tuple[Factor, ...]], ...]
    exact: bool = True

    def decode(self, k: int, kept_labels: Sequence[int] = ()) -> tuple[int, ...]:
        """Labels of all variables that reach `table[k, *kept_labels]`, the smallest label where several do.

        Raises ProblemError when that entry is inf.
        """
        kept = np.array(kept_labels, dtype=np.intp).reshape(1, len(self.keep))
        return tuple(self.decode_all(np.array([k]), kept)[0].tolist())

    def decode_all(self, ks: Labels, kept: Labels) -> Labels:
        """`decode` of several entries at once, (N, V): scenarios `ks` (N,) at labels `kept` (N, len(keep))."""
        missing = np.flatnonzero(~np.isfinite(self.table[(ks, *kept.T)]))
        if len(missing):
            k, at = int(ks[missing[0]]), tuple(kept[missing[0]].tolist())
            raise ProblemError(f"scenario {k} has no legal labelling with kept labels {at}.")
        labels = np.zeros((len(ks), len(self.sizes)), dtype=np.intp)
        labels[:, list(self.keep)] = kept
        for variable, factors in reversed(self.steps):
            if factors:
                costs = sum((f.at(ks, labels, variable) for f in factors), np.zeros((1, 1)))
                labels[:, variable] = costs.argmin(axis=1)
        return labels


def eliminate(graph: LabelGraph, max_entries: int = MAX_ENTRIES, relaxed_entries: int = 0) -> Elimination:
    """Minimise over all variables but `graph.keep`, the variable with the smallest table first.

    When a table of more than `max_entries` entries (scenarios included) would be needed, it is split into tables of at
    most `relaxed_entries` where these are given; else TooWide is raised.
    """
    shapes = {pair: Shape(pair, tuple(equal_slices(table, a)[0] for a in (1, 2))) for pair, table in graph.pair.items()}
    k = graph.scenarios
    order = Order.of(graph.sizes, graph.unary, list(shapes.values()), graph.keep, max_entries, relaxed_entries, k)
    return order.minimise(graph)


@dataclass(frozen=True, eq=False)
class _Read:
    """How a minimum reads one factor: its table's axes in the order (variable, K, others), at the entries `picks`."""

    factor: int
    axes: tuple[int, ...]
    picks: tuple[Labels | None, ...]
    lengths: tuple[int, ...]

    def of(self, table: Costs) -> Costs:
        """The table (labels, K or 1, ...) with an axis, of length 1 where absent, for each other variable."""
        table = table.transpose(self.axes)
        for axis, pick in enumerate(self.picks):
            if pick is not None:
                table = np.take(table, pick, axis)
        return np.ascontiguousarray(table).reshape(len(table), table.shape[1], *self.lengths)


@dataclass(frozen=True, eq=False)
class _Minimum:
    """One minimum over a variable: of unary costs `single` and factors `reads`; it makes a factor of `shape`.

    Neighbours whose labels none of the factors tell apart are not in `shape`: a hub of many that have no choice would
    else ask for more dims than numpy's arrays have.
    """

    size: int
    single: tuple[int, ...]
    starts: Labels
    order: Labels
    reads: tuple[_Read, ...]
    shape: Shape

    def of(self, factors: Sequence[Factor], scenarios: int) -> Costs:
        """The table of the minimum."""
        own: Costs = np.zeros((1, self.size))
        for i in self.single:
            own = own + factors[i].table[:, factors[i].shape.maps[0]]
        own = np.minimum.reduceat(own[:, self.order], self.starts, axis=1)
        own = own.T.reshape(len(self.starts), -1, *[1] * len(self.shape.scope))
        parts = [read.of(factors[read.factor].table) for read in self.reads]
        if parts:
            smallest = min(range(len(parts)), key=lambda i: parts[i].size)
            parts[smallest] = parts[smallest] + own
        return _min_of_sums(parts or [own], (scenarios, *self.shape.entries))


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which variables of a structure are eliminated, and all minima that are taken."""

    sizes: tuple[int, ...]
    keep: Scope
    shapes: tuple[Shape, ...]
    firsts: dict[Pair, tuple[Labels, Labels]]
    steps: tuple[tuple[int, tuple[int, ...], tuple[_Minimum, ...]], ...]
    left: tuple[int, ...]
    exact: bool

    @classmethod
    def of(
        cls,
        sizes: tuple[int, ...],
        unary: Iterable[int],
        pairs: Sequence[Shape],
        keep: Scope,
        max_entries: int,
        relaxed_entries: int = 0,
        scenarios: int = 1,
    ) -> Order:
        """Of graphs with costs of the variables `unary` and of `pairs`, in which labels of one entry have equal costs.

        Sizes of tables are as in `eliminate`, for so many scenarios.
        """
        shapes = [Shape((v,), (np.arange(sizes[v]),)) for v in unary]
        shapes += [s if s.scope[0] != s.scope[1] else Shape(s.scope[:1], (np.arange(len(s.maps[0])),)) for s in pairs]
        firsts = {(s.scope[0], s.scope[1]): (_first_of_each(s.maps[0]), _first_of_each(s.maps[1])) for s in pairs}
        touching = {v: [i for i, s in enumerate(shapes) if v in s.scope] for v in range(len(sizes))}
        given, steps, exact = len(shapes), [], True
        open_variables = set(range(len(sizes))) - set(keep)
        entries: dict[int, int] = {}
        while open_variables:
            entries |= {v: _entries(v, [shapes[i] for i in touching[v]]) for v in open_variables - entries.keys()}
            variable = min(open_variables, key=lambda v: (entries[v], v))
            used = tuple(touching[variable])
            groups = [used]
            if entries[variable] * scenarios > max_entries:
                if not relaxed_entries:
                    raise TooWide(variable, entries[variable] * scenarios, max_entries)
                groups, exact = _groups(variable, used, shapes, relaxed_entries // scenarios), False
            touched = {v for i in used for v in shapes[i].scope}
            open_variables.discard(variable)
            for v in touched:
                touching[v] = [i for i in touching[v] if i not in used]
                entries.pop(v, None)
            made = [_minimum(variable, sizes[variable], group, shapes) for group in groups]
            for minimum in made:
                for v in minimum.shape.scope:
                    touching[v].append(len(shapes))
                shapes.append(minimum.shape)
            steps.append((variable, used, tuple(made)))
        left = tuple(dict.fromkeys(i for v in keep for i in touching[v]))
        return cls(sizes, keep, tuple(shapes[:given]), firsts, tuple(steps), left, exact)

    @property
    def entries(self) -> int:
        """Entries of all tables that are made, for one scenario."""
        return sum(prod(minimum.shape.entries) for _, _, minima in self.steps for minimum in minima)

    def minimise(self, graph: LabelGraph) -> Elimination:
        """The minimum of a graph of this structure."""
        pair = {key: self._merged(key, table) for key, table in graph.pair.items()}
        return self.minimum(graph.unary, pair, graph.scenarios)

    def minimum(self, unary: Mapping[int, Costs], pair: Mapping[Pair, Costs], scenarios: int) -> Elimination:
        """The minimum of costs in the order of the structure; pairs have one entry for labels that share one."""
        tables = [*unary.values(), *pair.values()]
        factors = [Factor(shape, table) for shape, table in zip(self.shapes, tables, strict=True)]
        steps = []
        constant = np.zeros(scenarios)
        for variable, used, minima in self.steps:
            steps.append((variable, tuple(factors[i] for i in used)))
            for minimum in minima:
                table = minimum.of(factors, scenarios)
                factors.append(Factor(minimum.shape, table))
                if not minimum.shape.scope:
                    constant = constant + table
        table = self._kept(constant, [factors[i] for i in self.left])
        return Elimination(table, self.sizes, self.keep, tuple(steps), self.exact)

    def _merged(self, pair: Pair, table: Costs) -> Costs:
        """The table with one entry for labels that share one; of a variable with itself, its diagonal."""
        if pair[0] == pair[1]:
            return np.diagonal(table, axis1=1, axis2=2)
        for axis, first in enumerate(self.firsts[pair], start=1):
            if len(first) < table.shape[axis]:
                table = np.take(table, first, axis)
        return table

    def _kept(self, constant: Costs, factors: Iterable[Factor]) -> Costs:
        shape = (len(constant), *(self.sizes[v] for v in self.keep))
        if prod(shape) > MAX_ENTRIES:
            raise TooWide(self.keep[-1], prod(shape), MAX_ENTRIES)
        table = np.zeros(shape) + constant.reshape(-1, *[1] * len(self.keep))
        for factor in factors:
            scope = factor.shape.scope
            axes = sorted(range(len(scope)), key=lambda a: self.keep.index(scope[a]))
            spread = factor.table.transpose(0, *(a + 1 for a in axes))
            spread = spread[np.ix_(np.arange(len(spread)), *(factor.shape.maps[a] for a in axes))]
            table = table + spread.reshape(len(spread), *(self.sizes[v] if v in scope else 1 for v in self.keep))
        return table


def _first_of_each(classes: Labels) -> Labels:
    """One label of each class."""
    return np.unique(classes, return_index=True)[1]


def _groups(variable: int, factors: Sequence[int], shapes: Sequence[Shape], max_entries: int) -> list[tuple[int, ...]]:
    """The factors dealt into few groups whose tables are no larger than `max_entries` or one factor's own.

    Large factors come first; each joins the first group with room.
    """
    groups: list[tuple[int, ...]] = []
    for factor in sorted(factors, key=lambda i: _entries(variable, [shapes[i]]), reverse=True):
        wanted = ([shapes[i] for i in (*group, factor)] for group in groups)
        at = next((i for i, group in enumerate(wanted) if _entries(variable, group) <= max_entries), len(groups))
        groups[at : at + 1] = [(*(groups[at] if at < len(groups) else ()), factor)]
    return groups


def _neighbours(variable: int, shapes: Iterable[Shape]) -> list[int]:
    return sorted({v for s in shapes for v in s.scope} - {variable})


def _joint_classes(variable: int, shapes: Iterable[Shape], size: int) -> tuple[Labels, Labels]:
    """Classes of the labels of `variable` that none of `shapes` over other variables, too, can tell apart."""
    maps = [s.listed[s.scope.index(variable)] for s in shapes if variable in s.scope and len(s.scope) > 1]
    return classes_of(zip(*maps, strict=True)) if maps else classes_of([0] * size)


def _entries(variable: int, shapes: Sequence[Shape]) -> int:
    """Entries of the table that eliminating `variable` makes, for one scenario."""
    maps: dict[int, list[tuple[Shape, int]]] = {}
    for shape in shapes:
        for axis, v in enumerate(shape.scope):
            if v != variable:
                maps.setdefault(v, []).append((shape, axis))
    return prod(map(_joint_entries, maps.values()))


def _joint_entries(maps: Sequence[tuple[Shape, int]]) -> int:
    """How many classes of the labels of a variable the axes of some shapes tell apart."""
    if len(maps) == 1:
        ((shape, axis),) = maps
        return shape.entries[axis]
    return len(set(zip(*(shape.listed[axis] for shape, axis in maps), strict=True)))


def _minimum(variable: int, size: int, factors: Sequence[int], shapes: Sequence[Shape]) -> _Minimum:
    """The minimum over `variable` of the sum of `factors`, over its neighbours."""
    mine = [shapes[i] for i in factors]
    joint = {n: _joint_classes(n, mine, 0) for n in _neighbours(variable, mine)}
    told_apart = [n for n in joint if len(joint[n][1]) > 1]
    scope = tuple(sorted(told_apart, key=lambda n: (len(joint[n][1]), n)))
    classes, first = _joint_classes(variable, mine, size)
    order = np.argsort(classes, kind="stable")
    starts = np.searchsorted(classes[order], np.arange(len(first)))
    picks = {variable: first, **{n: joint[n][1] for n in scope}}
    reads = tuple(_read(variable, i, shapes[i], scope, picks) for i in factors if len(shapes[i].scope) > 1)
    single = tuple(i for i in factors if len(shapes[i].scope) == 1)
    return _Minimum(size, single, starts, order, reads, Shape(scope, tuple(joint[n][0] for n in scope)))


def _read(variable: int, factor: int, shape: Shape, scope: Scope, picks: dict[int, Labels]) -> _Read:
    inner = [v for v in scope if v in shape.scope]
    of_one_entry = [v for v in shape.scope if v not in (variable, *inner)]
    axes = (shape.scope.index(variable) + 1, 0, *(shape.scope.index(v) + 1 for v in (*inner, *of_one_entry)))
    rows = [None if v < 0 else shape.map_of(v)[picks[v]] for v in (variable, -1, *inner)]
    whole = [shape.entries[axis - 1] if axis else 0 for axis in axes[: len(rows)]]
    wanted = tuple(
        None if r is None or (len(r) == n and (r == np.arange(n)).all()) else r
        for r, n in zip(rows, whole, strict=True)
    )
    return _Read(factor, axes, wanted, tuple(len(picks[v]) if v in inner else 1 for v in scope))


def _min_of_sums(parts: list[Costs], shape: tuple[int, ...]) -> Costs:
    """Minimum over axis 0 of the broadcast sum of `parts`, each (L, K or 1, ...); the result has `shape`."""
    parts = sorted(parts, key=lambda p: p.size)
    if len(parts[0]) * prod(shape) <= CHUNK_ENTRIES:
        at_once: Costs = sum(parts[1:], parts[0]).min(axis=0)
        return at_once if at_once.shape == shape else np.broadcast_to(at_once, shape).copy()
    result = np.full(shape, np.inf)
    finite = np.logical_and.reduce([np.isfinite(p).reshape(len(p), -1).any(axis=1) for p in parts])
    legal = np.flatnonzero(finite).tolist()
    rows = max(1, CHUNK_ENTRIES // prod(shape[1:]))
    for start in range(0, shape[0], rows):
        best = result[start : start + rows]
        chunk = [p[:, start : start + rows] if p.shape[1] > 1 else p for p in parts]
        total = np.empty_like(best)
        for x in legal:
            _sum_into(total, [c[x] for c in chunk])
            np.minimum(best, total, out=best)
    return result


def _sum_into(total: Costs, parts: list[Costs]) -> None:
    if len(parts) == 1:
        total[...] = parts[0]
        return
    np.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        np.add(total, part, out=total)
