"""Chains over one mesh that differ in the microbatch alone: their tables are made together, in ever better rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from autopar.formulate.layers.layer_tables import Ask, LayerSolver
from autopar.formulate.layers.run_tables import RunTables
from autopar.formulate.layers.runs import LayerRun, Surroundings, alike
from autopar.formulate.layers.tables import Least, Price, least_of, passing_seconds

if TYPE_CHECKING:
    from autopar.formulate.chains.reckoning import Reckoning
    from autopar.formulate.chains.strategies import Chains, Found

FIRST, RUN, WHOLE = 1, 2, 3
"""Ever better bounds, each dearer than the one before."""
ROUNDS, WHOLE_ROUNDS = 5, 3
"""How often prices of bytes are chosen anew, for the longest run and for all."""
NEAR = 1.05
"""Siblings that promise this many times the seconds of the one asked for are bounded with it."""
ROWS = 1 << 24
"""Entries of all tables that elimination makes at once."""


News: TypeAlias = dict[int, tuple[int, "Found"]]
"""By number of a member the level to which it is bounded, and what was found."""


@dataclass(eq=False)
class Siblings:
    """`members` have the same runs and the same choices."""

    members: list[Chains] = field(default_factory=list)
    _levels: dict[Chains, int] = field(default_factory=dict)
    _told: dict[int, tuple[int, bool]] = field(default_factory=dict)
    _calls: dict[tuple[Surroundings, int], Least] = field(default_factory=dict)

    def bound(self, asked: Chains, level: int) -> None:
        """Bound a member, and with it those that are about as promising.

        FIRST: by the longest run's seconds and by its bytes alone; RUN: by that run with prices of bytes; WHOLE: so by
        all runs.
        """
        if level > FIRST:
            self.bound(asked, level - 1)
        waiting = self._waiting(asked, level)
        if level == FIRST:
            self._round({m: m.rough.dual.first() for m in waiting}, lambda m: m.rough, whole=False)
        elif level == RUN:
            for _ in range(ROUNDS):
                self._round({m: m.rough.dual.asked() for m in waiting}, lambda m: m.rough)
        else:
            seeds = {m: m.rough.dual.near() for m in waiting}
            for _ in range(WHOLE_ROUNDS):
                self._round({m: m.whole.dual.asked(seeds[m]) for m in waiting}, lambda m: m.whole)
        self._levels |= dict.fromkeys(waiting, level)

    def level(self, member: Chains) -> int:
        """How well a member is bounded; 0: not yet."""
        return self._levels.get(member, 0)

    def news(self) -> News:
        """What has been found since this was asked last, for another process with the same members to `learn`."""
        new: News = {}
        for i, member in enumerate(self.members):
            found = member.found
            known = self.level(member), found.calls is not None
            if known != self._told.get(i, (0, False)):
                new[i] = known[0], found
                self._told[i] = known
        return new

    def learn(self, news: News) -> None:
        """Take over what another process has found."""
        for i, (level, found) in news.items():
            self.members[i].adopt(found)
            self._levels[self.members[i]] = level

    def calls(self, asked: Chains, around: Surroundings) -> Least:
        """What a layer takes at least by its calls, each as suits it best: found for all members at once."""
        key = around, asked.setting.batch
        if key not in self._calls:
            space = asked.space_of(around)
            batches = list(dict.fromkeys(m.setting.batch for m in self.members if m.possible or m is asked))
            found = least_of(space, asked.known.calls.of(space, batches, asked.setting.mesh), len(batches))
            self._calls |= zip([(around, batch) for batch in batches], found, strict=True)
        return self._calls[key]

    def _waiting(self, asked: Chains, level: int) -> list[Chains]:
        """Members to be bounded now: those that have not been and promise about as much."""
        waiting = [m for m in self.members if m.possible and self.level(m) < level]
        if asked not in waiting:
            return []
        near = NEAR * asked.promise_s
        return [m for m in waiting if m is asked or (self.level(m) == level - 1 and m.promise_s <= near)]

    def _round(
        self, asked: Mapping[Chains, list[Price]], of: Callable[[Chains], Reckoning], whole: bool = True
    ) -> None:
        """Tables of members at the prices asked for, and what they show."""
        for few in self._lots({m: prices for m, prices in asked.items() if prices}):
            first = next(iter(few))
            runs = [first.runs[r] for r in of(first).numbers]
            for member, found in self.tables(few, True, runs).items():
                of(member).note(member, found, few[member], whole)

    @staticmethod
    def _longest(members: Iterable[Chains]) -> LayerRun:
        return max(next(iter(members)).runs, key=lambda run: run.count)

    def _lots(self, asked: Mapping[Chains, list[Price]]) -> Iterable[dict[Chains, list[Price]]]:
        """As many members at a time as there is memory for their tables."""
        lot: dict[Chains, list[Price]] = {}
        for member, prices in asked.items():
            if len(lot) * len(prices) * self._entries(member) > ROWS:
                yield lot
                lot = {}
            lot[member] = prices
        if lot:
            yield lot

    def _entries(self, member: Chains) -> int:
        """Entries for one member and price."""
        pins = [run.around.pins for run in member.runs]
        modes = max(len(p.zero) * len(p.recompute) for p in pins)
        return modes * self.solver(member, alike(self._longest([member]).around)).entries()

    def tables(
        self, asked: Mapping[Chains, Sequence[Price]], bounding: bool, runs: Sequence[LayerRun]
    ) -> dict[Chains, list[RunTables]]:
        """Tables of some runs of some members at some prices."""
        found: dict[Chains, dict[Surroundings, RunTables]] = {member: {} for member in asked}
        for around in dict.fromkeys(alike(run.around) for run in runs):
            asks = [self._ask(member, around, prices, bounding) for member, prices in asked.items()]
            solved = self.solver(next(iter(asked)), around).solve(asks)
            for member, tables in zip(asked, solved, strict=True):
                found[member][around] = tables
        return {member: [own[alike(run.around)] for run in runs] for member, own in found.items()}

    def _ask(self, member: Chains, around: Surroundings, prices: Sequence[Price], bounding: bool) -> Ask:
        space = self.solver(member, around).space
        passing = passing_seconds(space, around, member.setting, member.relayouts)
        states = member.number(space)
        return Ask(member.costs_in(around), passing, member.setting, member.rates, prices, states, bounding)

    def solver(self, member: Chains, around: Surroundings) -> LayerSolver:
        """Of a layer; its choices are the same for all members, and for all meshes of such sizes."""
        key = member.space_of(around), around
        if key not in member.known.solvers:
            member.known.solvers[key] = LayerSolver(*key)
        return member.known.solvers[key]
