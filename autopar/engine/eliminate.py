"""Exact minimum of a label graph by min-plus variable elimination (non-serial dynamic programming).

U. Bertele, F. Brioschi: Nonserial Dynamic Programming, 1972; R. Dechter: Bucket elimination, 1999. Labels that a table
can't tell apart share one entry of it (cost tables of layouts have few distinct rows), and no back pointers are
stored: decoding takes each minimum again, at the labels of the neighbours, which costs one row a variable.

Where a table would be too large, the costs that touch the variable are dealt into groups whose tables are not, and each
group takes a minimum of its own (R. Dechter, I. Rish: Mini-buckets, 2003). The result is then a lower bound, and what
is decoded a good labelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autopar.engine.errors import ProblemError, TooWide
from autopar.engine.label_graph import Costs, LabelGraph, Labels, classes_of, equal_slices

MAX_ENTRIES = 1 << 25
"""Largest table (256 MiB of float64) that elimination may make unless told otherwise."""
CHUNK_ENTRIES = 1 << 15
"""Entries worked on at once: they stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A cost over the variables of `scope`: `table[k, maps[0][label_0], maps[1][label_1], ...]`, k from K or 1."""

    scope: tuple[int, ...]
    maps: tuple[Labels, ...]
    table: Costs

    def at(self, k: int, labels: Labels, free: int) -> Costs:
        """Costs (L_free,) of the labels of `free` in scenario k, the other variables at `labels`."""
        index = [slice(None) if v == free else m[labels[v]] for v, m in zip(self.scope, self.maps, strict=True)]
        row: Costs = self.table[(min(k, len(self.table) - 1), *index)]
        return row[self.map_of(free)]

    def map_of(self, variable: int) -> Labels:
        """The class of each label of `variable`."""
        return self.maps[self.scope.index(variable)]

    def spread(self, scope: Sequence[int], picks: Sequence[Labels]) -> Costs:
        """The table (K or 1, ...) with one axis for each variable of `scope`, at the labels `picks`; 1 where absent.

        `scope` must hold the factor's own variables.
        """
        order = sorted(range(len(self.scope)), key=lambda a: scope.index(self.scope[a]))
        table = self.table.transpose(0, *(a + 1 for a in order))
        rows = [self.maps[a][picks[scope.index(self.scope[a])]] for a in order]
        table = table[np.ix_(np.arange(len(table)), *rows)]
        return table.reshape(len(table), *(len(p) if v in self.scope else 1 for v, p in zip(scope, picks, strict=True)))


@dataclass(frozen=True, eq=False)
class Elimination:
    """The minimum `table` (K, *L_keep) over the kept variables; inf where no legal labelling exists.

    It is a lower bound of the minimum where not `exact`.
    """

    table: Costs
    graph: LabelGraph
    steps: tuple[tuple[int, tuple[Factor, ...]], ...]
    exact: bool = True

    def decode(self, k: int, kept_labels: Sequence[int] = ()) -> tuple[int, ...]:
        """Labels of all variables that reach `table[k, *kept_labels]`, the smallest label where several do.

        Raises ProblemError when that entry is inf.
        """
        if not np.isfinite(self.table[(k, *kept_labels)]):
            raise ProblemError(f"scenario {k} has no legal labelling with kept labels {tuple(kept_labels)}.")
        labels = np.zeros(len(self.graph.sizes), dtype=np.intp)
        labels[list(self.graph.keep)] = kept_labels
        for variable, factors in reversed(self.steps):
            costs = np.zeros(self.graph.sizes[variable])
            for factor in factors:
                costs = costs + factor.at(k, labels, variable)
            labels[variable] = np.argmin(costs)
        return tuple(int(x) for x in labels)


def eliminate(graph: LabelGraph, max_entries: int = MAX_ENTRIES, relaxed_entries: int = 0) -> Elimination:
    """Minimise over all variables but `graph.keep`, the variable with the smallest table first.

    When a table of more than `max_entries` entries (scenarios included) would be needed, it is split into tables of at
    most `relaxed_entries` where these are given; else TooWide is raised.
    """
    scenarios = graph.scenarios
    factors = [_factor(scope, table) for scope, table in graph.tables()]
    open_variables = set(range(len(graph.sizes))) - set(graph.keep)
    entries: dict[int, int] = {}
    steps: list[tuple[int, tuple[Factor, ...]]] = []
    touching = {v: [f for f in factors if v in f.scope] for v in range(len(graph.sizes))}
    constant, exact = np.zeros(scenarios), True
    while open_variables:
        entries |= {v: _entries(v, touching[v]) for v in open_variables - entries.keys()}
        variable = min(open_variables, key=lambda v: (entries[v], v))
        used = tuple(touching[variable])
        groups = [used]
        if entries[variable] * scenarios > max_entries:
            if not relaxed_entries:
                raise TooWide(variable, entries[variable] * scenarios, max_entries)
            groups, exact = _groups(variable, used, relaxed_entries // scenarios), False
        steps.append((variable, used))
        open_variables.discard(variable)
        for neighbour in {n for f in used for n in f.scope}:
            entries.pop(neighbour, None)
            touching[neighbour] = [f for f in touching[neighbour] if f not in used]
        for group in groups:
            message = _minimise(variable, graph.sizes[variable], group, scenarios)
            if not message.scope:
                constant = constant + message.table
            for neighbour in message.scope:
                touching[neighbour].append(message)
    left = {id(f): f for v in graph.keep for f in touching[v]}
    return Elimination(_kept_table(graph, constant, left.values(), max_entries), graph, tuple(steps), exact)


def _groups(variable: int, factors: Sequence[Factor], max_entries: int) -> list[tuple[Factor, ...]]:
    """The factors dealt into few groups whose tables are no larger than `max_entries` or one factor's own.

    Large factors come first; each joins the first group with room.
    """
    groups: list[tuple[Factor, ...]] = []
    for factor in sorted(factors, key=lambda f: _entries(variable, [f]), reverse=True):
        room = (i for i, group in enumerate(groups) if _entries(variable, [*group, factor]) <= max_entries)
        at = next(room, len(groups))
        groups[at : at + 1] = [(*(groups[at] if at < len(groups) else ()), factor)]
    return groups


def _factor(scope: tuple[int, ...], table: Costs) -> Factor:
    """A factor whose labels are merged where the table can't tell them apart; (i, i) becomes a unary one."""
    if len(scope) == 2 and scope[0] == scope[1]:
        scope, table = scope[:1], np.diagonal(table, axis1=1, axis2=2)
    if len(scope) == 1:
        return Factor(scope, (np.arange(table.shape[1]),), table)
    maps = []
    for axis in range(1, len(scope) + 1):
        classes, first = equal_slices(table, axis)
        maps.append(classes)
        table = np.take(table, first, axis)
    return Factor(scope, tuple(maps), table)


def _neighbours(variable: int, factors: Iterable[Factor]) -> list[int]:
    return sorted({v for f in factors for v in f.scope} - {variable})


def _joint_classes(variable: int, factors: Iterable[Factor], size: int) -> tuple[Labels, Labels]:
    """Classes of the labels of `variable` that none of `factors` over other variables, too, can tell apart."""
    maps = [f.map_of(variable) for f in factors if variable in f.scope and len(f.scope) > 1]
    return classes_of(zip(*(m.tolist() for m in maps), strict=True)) if maps else classes_of([0] * size)


def _entries(variable: int, factors: Sequence[Factor]) -> int:
    """Entries of the table that eliminating `variable` makes, for one scenario."""
    return prod(len(_joint_classes(n, factors, 0)[1]) for n in _neighbours(variable, factors))


def _minimise(variable: int, size: int, factors: Sequence[Factor], scenarios: int) -> Factor:
    """The factor over the neighbours of `variable` that holds the minimum over it of the sum of `factors`."""
    joint = {n: _joint_classes(n, factors, 0) for n in _neighbours(variable, factors)}
    scope = sorted(joint, key=lambda n: (len(joint[n][1]), n))
    classes, first = _joint_classes(variable, factors, size)
    own = _least_by_class(_unary(factors, size), classes, len(first))
    picks = [joint[n][1] for n in scope]
    spread = [f.spread([*scope, variable], [*picks, first]) for f in factors if len(f.scope) > 1]
    parts = [np.ascontiguousarray(np.moveaxis(s, -1, 0)) for s in spread]
    own = own.T.reshape(len(first), -1, *[1] * len(scope))
    if parts:
        smallest = min(range(len(parts)), key=lambda i: parts[i].size)
        parts[smallest] = parts[smallest] + own
    table = _min_of_sums(parts or [own], (scenarios, *(len(p) for p in picks)))
    return Factor(tuple(scope), tuple(joint[n][0] for n in scope), table)


def _unary(factors: Iterable[Factor], size: int) -> Costs:
    total: Costs = np.zeros((1, size))
    for factor in factors:
        if len(factor.scope) == 1:
            total = total + factor.table[:, factor.maps[0]]
    return total


def _least_by_class(costs: Costs, classes: Labels, count: int) -> Costs:
    """(K or 1, count): the least of `costs` (K or 1, L) in each class."""
    order = np.argsort(classes, kind="stable")
    starts = np.searchsorted(classes[order], np.arange(count))
    least: Costs = np.minimum.reduceat(costs[:, order], starts, axis=1)
    return least


def _min_of_sums(parts: list[Costs], shape: tuple[int, ...]) -> Costs:
    """Minimum over axis 0 of the broadcast sum of `parts`, each (L, K or 1, ...); the result has `shape`."""
    result = np.full(shape, np.inf)
    parts = sorted(parts, key=lambda p: p.size)
    legal = [x for x in range(len(parts[0])) if all(np.isfinite(p[x]).any() for p in parts)]
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


def _kept_table(graph: LabelGraph, constant: Costs, factors: Iterable[Factor], max_entries: int) -> Costs:
    shape = (graph.scenarios, *(graph.sizes[v] for v in graph.keep))
    if prod(shape) > max_entries:
        raise TooWide(graph.keep[-1], prod(shape), max_entries)
    table = np.zeros(shape) + constant.reshape(-1, *[1] * len(graph.keep))
    picks = [np.arange(graph.sizes[v]) for v in graph.keep]
    for factor in factors:
        table = table + factor.spread(graph.keep, picks)
    return table
