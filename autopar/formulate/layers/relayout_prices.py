"""Seconds of layout changes on one mesh, from all layouts to all others at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost.moves import Dims, Piece, Pieces, dims_of, relayout_pieces, uneven_dims
from autopar.cost.pricer import Pricer, Seconds
from autopar.graph import Layout, TensorSpec
from autopar.plan import MeshAxis

Layouts: TypeAlias = tuple[Layout | None, ...]
"""Layouts by label; None = illegal."""
Change: TypeAlias = tuple[Pieces, Pieces]
"""What a change of layout takes forward and backward."""


class RelayoutPrices:
    """Each piece of work is asked for once for each size of tensor, each table is made once."""

    def __init__(self, pricer: Pricer, mesh: tuple[MeshAxis, ...]) -> None:
        self._pricer, self._mesh = pricer, mesh
        self._known: dict[tuple[int, str], dict[Piece, float]] = {}
        self._sizes = tuple(axis.size for axis in mesh)
        self._devices = prod(self._sizes)
        self._tables: dict[tuple[int, str, bool, Layouts, Layouts, Dims], tuple[Seconds, Seconds]] = {}
        self._changes: dict[tuple[Layouts, Layouts, Dims], _Changes] = {}
        self._each: dict[tuple[Layout, Layout, Dims], Change] = {}

    def table(self, spec: TensorSpec, sources: Layouts, targets: Layouts, batch: int) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds from each source to each target, shape (sources, targets); inf = illegal.

        The tables are shared: they must not be changed.
        """
        key = (prod(spec.shape_at(batch)), spec.dtype, spec.requires_grad, sources, targets, self._dims(spec, batch))
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return self._tables[key]

    def learn(self, asked: Sequence[tuple[TensorSpec, Layouts, Layouts]], batch: int) -> None:
        """Price at once what tables of these tensors, sources and targets are made of."""
        wanted: dict[tuple[int, str], dict[Piece, None]] = {}
        for spec, sources, targets in asked:
            uneven = uneven_dims(self._dims(spec, batch), (*sources, *targets), self._sizes)
            size = prod(spec.shape_at(batch)), spec.dtype
            wanted.setdefault(size, {}).update(dict.fromkeys(self._changed(sources, targets, uneven).pieces))
        self._price(wanted)

    def _dims(self, spec: TensorSpec, batch: int) -> Dims:
        """The dims of a value that the mesh might split unevenly; () where it can't, so that its size says all."""
        dims = dims_of(spec, batch)
        return () if all(length // unit % self._devices == 0 for length, unit in dims) else dims

    def _table(
        self, elements: int, dtype: str, trained: bool, sources: Layouts, targets: Layouts, dims: Dims
    ) -> tuple[Seconds, Seconds]:
        uneven = uneven_dims(dims, (*sources, *targets), self._sizes)
        changes = self._changed(sources, targets, uneven)
        self._price({(elements, dtype): changes.pieces})
        known = self._known.get((elements, dtype), {})
        each = np.array([known[piece] for piece in changes.pieces], dtype=np.float64)
        forward = np.append(changes.forward @ each, np.inf)[changes.which]
        if not trained:
            return forward, np.where(np.isinf(forward), np.inf, 0.0)
        return forward, np.append(changes.backward @ each, np.inf)[changes.which]

    def _changed(self, sources: Layouts, targets: Layouts, uneven: Dims) -> _Changes:
        """The changes from every source to every target."""
        key = sources, targets, uneven
        if key not in self._changes:
            rows, columns = (tuple(dict.fromkeys(layouts)) for layouts in (sources, targets))
            found = [[self._change(s, t, uneven) for t in columns] for s in rows]
            pick = np.ix_([rows.index(s) for s in sources], [columns.index(t) for t in targets])
            self._changes[key] = _Changes.of(found, len(columns), pick)
        return self._changes[key]

    def _change(self, source: Layout | None, target: Layout | None, uneven: Dims) -> Change | None:
        if source is None or target is None:
            return None
        key = source, target, uneven
        if key not in self._each:
            self._each[key] = relayout_pieces(source, target, self._mesh, uneven)
        return self._each[key]

    def _price(self, wanted: Mapping[tuple[int, str], Iterable[Piece]]) -> None:
        """Seconds of pieces on tensors of these sizes and dtypes."""
        new = [
            (size, p) for size, pieces in wanted.items() for p in pieces if p not in self._known.setdefault(size, {})
        ]
        local, sent = [x for x in new if x[1].is_local], [x for x in new if not x[1].is_local]
        if local:
            times = self._pricer.ops([piece.op_key(*size) for size, piece in local])
            for (size, piece), seconds in zip(local, times.forward_s.tolist(), strict=True):
                self._known[size][piece] = seconds
        if sent:
            moved = self._pricer.collectives([piece.collective_key(*size) for size, piece in sent])
            for (size, piece), seconds in zip(sent, moved.seconds.tolist(), strict=True):
                self._known[size][piece] = seconds


class _Changes(NamedTuple):
    """Distinct changes of layout: how often each takes each of the `pieces` of work, forward and backward (changes,
    pieces); `which` (sources, targets) of them, one more where illegal."""

    forward: Seconds
    backward: Seconds
    pieces: tuple[Piece, ...]
    which: NDArray[np.intp]

    @classmethod
    def of(cls, found: Sequence[Sequence[Change | None]], targets: int, pick: tuple[NDArray[np.intp], ...]) -> _Changes:
        """Of `found` from each distinct source to each of so many distinct targets (None = illegal); `pick`: those
        wanted."""
        distinct = dict.fromkeys(change for row in found for change in row if change is not None)
        numbers: dict[Change | None, int] = {change: i for i, change in enumerate([*distinct, None])}
        numbered = [numbers[change] for row in found for change in row]
        which = np.array(numbered, dtype=np.intp).reshape(len(found), targets)  # also where there are none
        forward, backward = (tuple(change[way] for change in distinct) for way in (0, 1))
        pieces = tuple(sorted({piece for change in (*forward, *backward) for piece in change}))
        return cls(_counts(forward, pieces), _counts(backward, pieces), pieces, which[pick])


def _counts(changes: Sequence[Pieces], pieces: Sequence[Piece]) -> Seconds:
    """(changes, pieces): how often each change takes each piece."""
    place = {piece: i for i, piece in enumerate(pieces)}
    found = np.zeros((len(changes), len(pieces)))
    for row, change in zip(found, changes, strict=True):
        for piece in change:
            row[place[piece]] += 1.0
    return found
