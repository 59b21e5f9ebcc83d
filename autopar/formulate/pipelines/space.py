"""The pipelines that are searched for a model and a cluster, and the one that a hand-written plan asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, prod

from autopar.cells import refusal
from autopar.cluster import MixedCluster
from autopar.cost.mixed import MixedPricer
from autopar.cost.orders import Shape
from autopar.cost.pricer import Pricer
from autopar.cost.roofline import RooflinePricer, flop_rate
from autopar.cost.work import model_flops
from autopar.errors import ConfigError
from autopar.formulate.chains.columns import Budget
from autopar.formulate.chains.known import Known
from autopar.formulate.chains.strategies import Chains
from autopar.formulate.config import Constraint, ManualConfig, nearest
from autopar.formulate.layers.tables import Setting
from autopar.formulate.mesh import config_mesh, mesh_of
from autopar.formulate.pins import Pins, pins_of, pins_of_constraints
from autopar.formulate.pipelines.book import StageBook
from autopar.formulate.pipelines.ground import (
    Devices,
    EvenGround,
    Ground,
    even_devices,
    ground_on,
    group_sizes,
    placed_devices,
    reversed_ground,
)
from autopar.formulate.pipelines.scenario import Cuts, PipelineScenario
from autopar.formulate.pipelines.stages import Units, block_indices, even_cuts
from autopar.graph import Layout, OpGraph
from autopar.plan import MeshAxis

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("gpipe", 1), ("zb", 1), ("zbv", 2))
"""Schedules that are searched, with the chunks of the model on each group of devices. More chunks than two gained less
than the search for them took (0.2 % on 70B dims); hand-written plans may have them. `zb` stands in for `zbv`, which is
the faster of the two, where there aren't enough units for that; `dualpipev` takes longer unless passes overlap.
Constraints may ask for others."""


@dataclass(frozen=True)
class Pipelines:
    """What all pipelines of a search share. `asked_bytes`: the memory limit that was asked for, if any."""

    graph: OpGraph
    pricer: Pricer
    global_batch: int
    budget: Budget
    known: Known
    asked_bytes: int | None = None
    _by_pricer: dict[int, Known] = field(default_factory=dict)
    _flops_of: dict[int, float] = field(default_factory=dict)

    def searched(self, devices: int, constraints: Sequence[Constraint]) -> Iterator[PipelineScenario]:
        """Every ground, mesh of a group, number of microbatches and schedule.

        Of a group's mesh the outer axis splits the batch, the inner one stays inside a node and is free. There are at
        least as many microbatches as groups, or one where the batch can't be split in time.
        """
        pinned = {c.key: c.value for c in constraints if not c.pattern}
        if any(c.key == "exclude" and c.value == "pp" for c in constraints):
            return
        units = Units(self.graph)
        for grounds in self._grounds(devices):
            groups = len(grounds[0].devices)
            if 1 < groups <= len(units) and pinned.get("pp", str(groups)) == str(groups):
                for mesh, ways in _meshes(grounds[0]):
                    size = int(pinned["microbatch_size"]) if "microbatch_size" in pinned else None
                    for count in self._counts(groups, ways, size):
                        yield from self._scenarios(units, grounds, mesh, ways, count, constraints)

    def finer(
        self,
        near: PipelineScenario,
        mesh: tuple[MeshAxis, ...],
        ways: int,
        constraints: Sequence[Constraint],
        zero_axes: frozenset[int] | None,
    ) -> Iterator[PipelineScenario]:
        """The same pipeline with another mesh of its groups, whose outer axis splits the batch `ways` ways, and about
        as many microbatches; ZeRO over some axes alone."""
        shape = near.shape
        pinned = next((int(c.value) for c in constraints if c.key == "microbatch_size" and not c.pattern), None)
        for count in nearest(list(self._counts(shape.groups, ways, pinned)), shape.num_microbatches):
            for found in self._scenarios(near.book.units, [near.ground], mesh, ways, count, constraints, zero_axes):
                if (found.shape.schedule, found.shape.chunks) == (shape.schedule, shape.chunks):
                    yield found

    def _grounds(self, devices: int) -> Iterator[list[Ground]]:
        """Groups of equal size: of equal nodes one after the other, of others placed, and the other way round."""
        if not isinstance(self.pricer, MixedPricer):
            for groups in _divisors(devices):
                yield [EvenGround(self.pricer, groups, devices // groups)]
            return
        for size in group_sizes(self.pricer.cluster):
            placed = self._placed(self.pricer.cluster, size, devices)
            if placed:
                ground = ground_on(self.pricer, placed)
                yield [ground, *reversed_ground(ground)]

    def _placed(self, cluster: MixedCluster, size: int, devices: int) -> Devices:
        """Groups of a mixed cluster's devices, of so many at most."""
        gradients = sum(spec.bytes_at(1) for spec in self.graph.params.values() if spec.requires_grad)
        cut = self.graph.cuts[len(self.graph.cuts) // 2]
        sent = sum(self.graph.values[name].bytes_at(self.global_batch) for name in cut.values)
        return placed_devices(cluster, size, gradients, sent / size)[: devices // size]

    def _counts(self, groups: int, ways: int, size: int | None) -> Iterator[int]:
        for count in _divisors(self.global_batch):
            batch = self.global_batch // count
            legal = count >= groups if self.graph.separable else count == 1
            if legal and batch >= ways and size in (None, -(-batch // ways)):
                yield count

    def _scenarios(
        self,
        units: Units,
        grounds: Sequence[Ground],
        mesh: tuple[MeshAxis, ...],
        ways: int,
        count: int,
        constraints: Sequence[Constraint],
        zero_axes: frozenset[int] | None = None,
    ) -> Iterator[PipelineScenario]:
        pins = pins_of_constraints(tuple(constraints), mesh, self.graph)
        if pins is None:
            return
        if ways > 1:
            size = prod(axis.size for axis in mesh)
            free = "microbatch_size" not in {c.key for c in constraints} and all(p.tensor_axes is None for p in pins)
            if ways == size <= grounds[0].pricers[0].cluster.devices_per_node and free:
                return  # the mesh of one free axis has all of these
            pins = [replace(p, data_axes=frozenset({0})) if p.tensor_axes is None else p for p in pins]
        pins = [replace(p, zero_axes=zero_axes) for p in pins]
        setting = Setting(mesh, self.global_batch // count, count, len(grounds[0].devices))
        books = self._books(units, pins, setting, grounds[0])
        if not books[0].chains.possible:
            return
        asked = _asked_schedules(constraints)
        for schedule, chunks in SCHEDULES if asked is None else asked:
            shape = Shape(schedule, setting.groups, chunks, count)
            legal = not refusal(schedule, set(), set(), shape.stages, count, setting.groups)
            stands_in = asked is not None or schedule != "zb" or 2 * shape.stages > len(units)
            legal &= shape.stages <= len(units) and stands_in
            for ground in grounds if legal else ():
                own = tuple(books[grounds[0].pricers.index(pricer)] for pricer in ground.pricers)
                yield PipelineScenario(own, ground, shape, ideal_s=self._ideal_s(ground, setting))

    def _books(self, units: Units, pins: Sequence[Pins], setting: Setting, ground: Ground) -> tuple[StageBook, ...]:
        """A book for each group, the same one for those with equal prices; all number layouts alike."""
        runs = self.known.runs(self.graph, pins, staged=True)
        most, states, found = min(setting.groups, setting.num_microbatches), dict[Layout, int](), dict[int, StageBook]()
        for pricer in ground.pricers:
            if id(pricer) not in found:
                chains = Chains(
                    runs, setting, pricer, self._budget_on(pricer), self._known_by(pricer), setting.groups,
                    tuple(sorted({1, most})), states,
                )  # fmt: skip
                found[id(pricer)] = StageBook(units, chains)
        return tuple(found[id(pricer)] for pricer in ground.pricers)

    def _budget_on(self, pricer: Pricer) -> Budget:
        """The budget, but for no more than the devices there may hold."""
        limit = self.budget.limit_bytes
        if limit is None or pricer is self.pricer:
            return self.budget
        return replace(self.budget, limit_bytes=min(limit, pricer.cluster.device.limit_bytes(self.asked_bytes)))

    def _known_by(self, pricer: Pricer) -> Known:
        return (
            self.known if pricer is self.pricer else self._by_pricer.setdefault(id(pricer), self.known.priced(pricer))
        )

    def _ideal_s(self, ground: Ground, setting: Setting) -> float:
        """Seconds of a microbatch through all stages, each of whose groups has its share of the work by the rate that
        large products reach there; 0 if rates are measured."""
        rates = {
            key: flop_rate(pricer.cluster.device, self.budget.policy.compute)
            for key, pricer in {id(pricer): pricer for pricer in ground.pricers}.items()
            if isinstance(pricer, RooflinePricer)
        }
        total = sum(rates.get(id(pricer), inf) for pricer in ground.pricers)
        return setting.groups * self._flops(setting.batch) / (total * prod(setting.sizes))

    def _flops(self, batch: int) -> float:
        if batch not in self._flops_of:
            self._flops_of[batch] = model_flops(self.graph, batch)
        return self._flops_of[batch]

    # --- by hand --------------------------------------------------------------------------------------------------

    def configured(self, config: ManualConfig, count: int) -> PipelineScenario:
        """The pipeline of a hand-written plan. Raises ConfigError where the model can't be cut or run so."""
        units, groups = Units(self.graph), config.pp
        shape = Shape(config.named_schedule, groups, config.chunks, count)
        reason = refusal(shape.schedule, {config.zero}, {config.recompute.split(":")[0]}, shape.stages, count, groups)
        if reason:
            raise ConfigError(f"config: {reason}")
        cuts = _config_cuts(config.stage_layers, len(units), shape.stages)
        blocks = block_indices(self.graph)
        mesh = config_mesh(config, len(blocks))
        pins = [
            pins_of(config, blocks.index(i) if i in blocks else None, mesh, len(blocks))
            for i in range(len(self.graph.layers))
        ]
        ground = self._configured_ground(groups, config.devices // groups)
        setting = Setting(mesh, self.global_batch // count, count, groups)
        return PipelineScenario(self._books(units, pins, setting, ground), ground, shape, cuts)

    def _configured_ground(self, groups: int, size: int) -> Ground:
        """So many groups: placed where the cluster is mixed and holds as many, else neighbouring devices."""
        if not isinstance(self.pricer, MixedPricer):
            return EvenGround(self.pricer, groups, size)
        placed = self._placed(self.pricer.cluster, size, groups * size)
        return ground_on(self.pricer, placed if len(placed) == groups else even_devices(groups, size))


def _asked_schedules(constraints: Sequence[Constraint]) -> list[tuple[str, int]] | None:
    """The schedules that constraints allow, with their chunks, named as in a configuration; None = nothing is asked."""
    pinned = {c.key: c.value for c in constraints if not c.pattern}
    name, chunks = pinned.get("schedule"), int(pinned.get("virtual_stages", 0))
    if not name and not chunks:
        return None
    usual = {"dualpipev": 2} | dict(SCHEDULES)
    names = [name] if name else [n for n in usual if n not in ("interleaved", "dualpipev")]
    configs = [ManualConfig(schedule=n, virtual_stages=chunks or usual[n]) for n in names]
    return [(c.named_schedule, c.chunks) for c in configs if c.chunks == c.virtual_stages]


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


def _meshes(ground: Ground) -> Iterator[tuple[tuple[MeshAxis, ...], int]]:
    """Meshes of a group with the ways that their outer axis splits the batch."""
    size = len(ground.devices[0])
    per_node = min(pricer.cluster.devices_per_node for pricer in ground.pricers)
    for inner in _divisors(size):
        if inner <= per_node:
            yield mesh_of((size // inner, inner)), size // inner


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
