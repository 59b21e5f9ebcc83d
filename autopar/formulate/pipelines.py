"""The pipelines that are searched for a model and a cluster, and the one that a hand-written plan asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from autopar.cells import refusal
from autopar.cost.orders import Shape
from autopar.cost.pricer import Pricer
from autopar.cost.roofline import RooflinePricer, flop_rate
from autopar.cost.work import model_flops
from autopar.errors import ConfigError
from autopar.formulate.book import StageBook
from autopar.formulate.chains import Chains, Known
from autopar.formulate.columns import Budget
from autopar.formulate.config import Constraint, ManualConfig
from autopar.formulate.mesh import config_mesh, mesh_of
from autopar.formulate.pins import Pins, pins_of, pins_of_constraints
from autopar.formulate.pipeline import Cuts, PipelineScenario
from autopar.formulate.relayout_prices import RelayoutPrices
from autopar.formulate.stages import Units, block_indices, even_cuts
from autopar.formulate.tables import Setting
from autopar.graph import OpGraph
from autopar.plan import MeshAxis
from autopar.schedules import SPLIT

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("gpipe", 1))
"""Schedules that are searched, with the chunks of the model on each group of devices. More chunks than two gained less
than the search for them took (0.2 % on 70B dims); hand-written plans may have them."""


@dataclass(frozen=True)
class Pipelines:
    """What all pipelines of a search share."""

    graph: OpGraph
    pricer: Pricer
    global_batch: int
    budget: Budget
    known: Known

    def searched(self, devices: int, constraints: Sequence[Constraint]) -> Iterator[PipelineScenario]:
        """Every number of groups of equal size, mesh of a group, number of microbatches and schedule.

        Of a group's mesh the outer axis splits the batch, the inner one stays inside a node and is free. There are at
        least as many microbatches as groups, or one where the batch can't be split in time.
        """
        pinned = {c.key: c.value for c in constraints if not c.pattern}
        if any(c.key == "exclude" and c.value == "pp" for c in constraints):
            return
        units = Units(self.graph)
        for groups in _divisors(devices):
            if 1 < groups <= len(units) and pinned.get("pp", str(groups)) == str(groups):
                for mesh, ways in self._meshes(devices // groups):
                    size = int(pinned["microbatch_size"]) if "microbatch_size" in pinned else None
                    for count in self._counts(groups, ways, size):
                        yield from self._scenarios(units, groups, mesh, ways, count, constraints)

    def _meshes(self, size: int) -> Iterator[tuple[tuple[MeshAxis, ...], int]]:
        """Meshes of a group with the ways that their outer axis splits the batch."""
        for inner in _divisors(size):
            if inner <= self.pricer.cluster.devices_per_node:
                yield mesh_of((size // inner, inner)), size // inner

    def _counts(self, groups: int, ways: int, size: int | None) -> Iterator[int]:
        for count in _divisors(self.global_batch):
            batch = self.global_batch // count
            legal = count >= groups if self.graph.separable else count == 1
            if legal and batch >= ways and size in (None, -(-batch // ways)):
                yield count

    def _scenarios(
        self,
        units: Units,
        groups: int,
        mesh: tuple[MeshAxis, ...],
        ways: int,
        count: int,
        constraints: Sequence[Constraint],
    ) -> Iterator[PipelineScenario]:
        pins = pins_of_constraints(tuple(constraints), mesh, self.graph)
        if pins is None:
            return
        if ways > 1:
            pins = [replace(p, data_axes=frozenset({0})) if p.tensor_axes is None else p for p in pins]
        book = self._book(units, pins, mesh, count, groups)
        if not book.chains.possible:
            return
        for schedule, chunks in SCHEDULES:
            shape = Shape(schedule, groups, chunks, count)
            legal = not refusal(schedule, set(), set(), shape.stages, count, groups)
            if legal and shape.stages <= len(units):
                yield PipelineScenario(book, shape, ideal_s=self._ideal_s(book))

    def _book(
        self, units: Units, pins: Sequence[Pins], mesh: tuple[MeshAxis, ...], count: int, groups: int
    ) -> StageBook:
        setting = Setting(mesh, self.global_batch // count, count, groups)
        most = min(groups, count)
        chains = Chains(
            self.known.runs(self.graph, pins, staged=True), setting, self.pricer, self.budget,
            RelayoutPrices(self.pricer, mesh), self.known, groups, tuple(sorted({1, most})),
        )  # fmt: skip
        return StageBook(units, chains)

    def _ideal_s(self, book: StageBook) -> float:
        """Seconds of a microbatch through all stages at the rate that large products reach; 0 if rates are measured."""
        if not isinstance(self.pricer, RooflinePricer):
            return 0.0
        setting = book.chains.setting
        rate = flop_rate(self.pricer.cluster.device, self.budget.policy.compute)
        return model_flops(self.graph, setting.batch) / (rate * prod(setting.sizes))

    # --- by hand --------------------------------------------------------------------------------------------------

    def configured(self, config: ManualConfig, count: int) -> PipelineScenario:
        """The pipeline of a hand-written plan. Raises ConfigError where the model can't be cut or run so."""
        units, groups = Units(self.graph), config.pp
        schedule = config.schedule
        if config.virtual_stages > 1 and schedule == "1f1b":
            schedule = "interleaved"
        shape = Shape(schedule, groups, config.virtual_stages, count)
        if schedule in SPLIT:
            raise ConfigError(f"schedule={schedule}: not supported in this version; give gpipe, 1f1b or interleaved")
        reason = refusal(schedule, {config.zero}, {config.recompute.split(":")[0]}, shape.stages, count, groups)
        if reason:
            raise ConfigError(f"config: {reason}")
        cuts = _config_cuts(config.stage_layers, len(units), shape.stages)
        blocks = block_indices(self.graph)
        mesh = config_mesh(config, len(blocks))
        pins = [
            pins_of(config, blocks.index(i) if i in blocks else None, mesh, len(blocks))
            for i in range(len(self.graph.layers))
        ]
        return PipelineScenario(self._book(units, pins, mesh, count, groups), shape, cuts)


def _config_cuts(text: str, units: int, stages: int) -> Cuts:
    """Cuts from `12/12/11/13`, the most even ones where nothing is given."""
    if not text:
        if units < stages:
            raise ConfigError(f"pp: {stages} stages can't be made of {units} blocks; give fewer")
        return even_cuts(units, stages)
    counts = [int(n) for n in text.split("/")]
    if len(counts) != stages or sum(counts) != units or min(counts) < 1:
        raise ConfigError(
            f"stage_layers={text}: {stages} stages need {stages} counts of at least 1 that add up to {units} blocks; "
            f"for example {'/'.join(map(str, _sizes(units, stages)))}"
        )
    cuts = [0]
    for n in counts:
        cuts.append(cuts[-1] + n)
    return tuple(cuts)


def _sizes(units: int, stages: int) -> list[int]:
    cuts = even_cuts(units, stages)
    return [b - a for a, b in pairwise(cuts)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
