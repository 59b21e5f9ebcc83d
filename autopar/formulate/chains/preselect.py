"""Which labellings of a layer are worth pricing exactly: those that no other one beats by the tables' own figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from autopar.engine.label_graph import Labels
from autopar.engine.stack_problem import Floats
from autopar.formulate.layers.run_tables import RunTables
from autopar.formulate.layers.storing import storage_costs
from autopar.formulate.layers.tables import Mode, passing_seconds

if TYPE_CHECKING:
    from autopar.formulate.chains.strategies import Chains

CLEARLY = 1e-3
"""By what share one is better in seconds or bytes to count, as tables leave out what differs by little."""


Labelling: TypeAlias = tuple[tuple[int, ...], int, str]
"""Labels of a layer's variables, ZeRO level, recomputation."""


def unbeaten(chains: Chains, tables: RunTables, found: Sequence[Labelling], ties: Sequence[int]) -> list[int]:
    """Numbers of the labellings that no other one of their kind beats: by no more seconds, bytes held and bytes saved.

    Compared are those between the same states of one ZeRO level, whose collectives tables know by their rates alone,
    that recompute alike; `ties` tell ways to store what is tied apart.
    """
    space = tables.space
    labels = np.array([labels for labels, _, _ in found], dtype=np.intp).reshape(len(found), len(space.variables))
    figures = np.zeros((len(found), 3))
    figures[:, 0], figures[:, 2] = _passes(chains, tables, labels, [recompute for _, _, recompute in found])
    figures[:, :2] += _storage(chains, tables, labels, [zero for _, zero, _ in found])
    kinds = [(own[space.entry], own[space.exit], *how, tie) for (own, *how), tie in zip(found, ties, strict=True)]
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    kind = np.array([numbers[k] for k in kinds], dtype=np.intp)
    no_worse = (figures[:, None] <= figures).all(axis=2) & (kind[:, None] == kind)
    better = (figures[:, None] < figures * (1 - CLEARLY)).any(axis=2)
    left: list[int] = np.flatnonzero(~(no_worse & better).any(axis=0)).tolist()
    return left


def _passes(chains: Chains, tables: RunTables, labels: Labels, again: Sequence[str]) -> tuple[Floats, Floats]:
    """Seconds of all microbatches and bytes saved in one, (N,)."""
    costs, space = chains.costs_in(tables.around), tables.space
    kind = np.array([costs.kinds.index(recompute) for recompute in again], dtype=np.intp)
    passing = passing_seconds(space, tables.around, chains.setting, chains.relayouts)
    seconds, saved = passing[labels[:, space.entry], labels[:, space.exit]], np.zeros(len(labels))
    for v, (single, kept) in enumerate(zip(costs.single, costs.kept, strict=True)):
        seconds += single[kind, labels[:, v]]
        saved += kept[kind, labels[:, v]]
    for (a, b), pair in costs.pair.items():
        seconds += pair[kind, labels[:, a], labels[:, b]]
    return chains.setting.num_microbatches * seconds, saved


def _storage(chains: Chains, tables: RunTables, labels: Labels, zeros: Sequence[int]) -> Floats:
    """Seconds that keeping parameters takes and bytes that are held, (N, 2)."""
    space, around = tables.space, tables.around
    axes = [around.zero_axes(state) for state in space.variables[space.entry].layouts]
    ways = [(zero, axes[entry] if zero else ()) for zero, entry in zip(zeros, labels[:, space.entry], strict=True)]
    distinct = list(dict.fromkeys(ways))
    way = np.array([distinct.index(w) for w in ways], dtype=np.intp)
    found = np.zeros((len(labels), 2))
    for column, weights in enumerate(((0.0, 1.0), (1.0, 0.0))):
        modes = [Mode(zero, data_axes, "none", *weights) for zero, data_axes in distinct]
        for v, costs in storage_costs(space, around, chains.setting, modes, chains.rates)[1:]:
            found[:, column] += costs[way, labels[:, v]]
    return found
