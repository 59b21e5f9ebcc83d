"""Bounds of the chains through some of a model's runs: through the longest alone, which are cheap, or through all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopar.engine.stack_problem import Floats
from autopar.formulate.chains.dual import PASSES, Dual
from autopar.formulate.layers.ladder import ONLY_BYTES
from autopar.formulate.layers.run_tables import CheapestChains, RunTables
from autopar.formulate.layers.storing import held_bytes
from autopar.formulate.layers.tables import Price

if TYPE_CHECKING:
    from autopar.formulate.chains.strategies import Chains


@dataclass(eq=False)
class Reckoning:
    """What prices of bytes have shown of chains through the runs numbered `numbers`; others cost what their calls do,
    hold nothing and join any states.

    `steps`: for prices asked for, the least costs (P, S, S) of one layer of each of the runs, whatever is tied.
    """

    dual: Dual
    numbers: tuple[int, ...]
    steps: list[tuple[Sequence[Price], list[Floats]]] = field(default_factory=list)

    def note(self, chains: Chains, tables: list[RunTables], prices: Sequence[Price], whole: bool = True) -> None:
        """Take from the tables of the runs at some prices what bounds are made of.

        Not `whole`: what seconds alone and bytes alone come to, without what chains hold.
        """
        size = len(chains.states)
        if chains.setting.staged:
            self.steps.append(
                (prices, [t.steps(prices, None, t.around.pins.zero, size).min(axis=(1, 2)) for t in tables])
            )
        counts = [chains.runs[r].count for r in self.numbers]
        cheapest = CheapestChains.of(tables, counts, prices, None, size)
        costs = cheapest.costs()
        if not whole:
            self.dual.note_first(*costs[:2].tolist())
            return
        held, saved = _bytes(
            chains, cheapest, [p for p, c in zip(prices, costs, strict=True) if np.isfinite(c) and p != PASSES]
        )
        for price, cost in zip(prices, costs.tolist(), strict=True):
            self.dual.note(price, cost, held.get(price, 0.0), saved.get(price, 0.0))

    def step_costs(self, calls_s: Sequence[float]) -> tuple[list[Price], list[Floats]]:
        """Prices, and for each of the model's runs the least cost (P, S, S) of one layer at each.

        Of runs that were not looked at, what a layer's calls take (`calls_s`), and no bytes.
        """
        prices = [price for asked, _ in self.steps for price in asked]
        known = [np.concatenate(own) for own in zip(*(costs for _, costs in self.steps), strict=True)]
        seconds = np.array([price[0] != ONLY_BYTES for price in prices])[:, None, None]
        found = [np.broadcast_to(seconds * own_s, known[0].shape) for own_s in calls_s]
        for number, costs in zip(self.numbers, known, strict=True):
            found[number] = costs
        return prices, found


def _bytes(
    chains: Chains, cheapest: CheapestChains, prices: Sequence[Price]
) -> tuple[dict[Price, float], dict[Price, float]]:
    """Bytes that the cheapest chain at each price holds, and those that it holds for each microbatch in flight."""
    held: dict[Price, float] = defaultdict(float)
    saved: dict[Price, float] = defaultdict(float)
    limited = [p for p in prices if p[0] != ONLY_BYTES and chains.budget.limit_bytes is not None]
    uses = [(p, use) for p in limited for ways in cheapest.best(cheapest.prices.index(p), 1) for use in ways]
    for r, tables in enumerate(cheapest.tables):
        mine = [(price, arc, times) for price, (run, arc, times) in uses if run == r]
        costs = chains.costs_in(tables.around)
        for (price, arc, times), labels in zip(mine, tables.labels([arc for _, arc, _ in mine]), strict=True):
            mode = tables.modes[arc.mode]
            kind = costs.kinds.index(mode.recompute)
            saved[price] += times * sum(float(of[kind][x]) for of, x in zip(costs.kept, labels.tolist(), strict=True))
            held[price] += times * held_bytes(tables.space, tables.around, chains.setting, chains.rates, mode, labels)
    return held, saved
