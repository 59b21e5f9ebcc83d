"""The space of plans: the scenarios to search on some devices, and the one that a hand-written plan asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from autopar.cluster import Cluster
from autopar.cost.mixed import MixedPricer
from autopar.cost.pricer import Pricer
from autopar.errors import ConfigError
from autopar.formulate.chains.known import Known
from autopar.formulate.config import Constraint, ManualConfig, microbatch_count, nearest, parse_constraints
from autopar.formulate.layers.runs import layer_runs
from autopar.formulate.layers.tables import Setting
from autopar.formulate.mesh import config_mesh, finer_sizes, mesh_of, node_sizes, search_meshes
from autopar.formulate.pins import (
    Pins,
    covered_ops,
    has_sequence,
    pins_of,
    pins_of_constraints,
    sequence_length,
)
from autopar.formulate.pipelines.ground import even_devices, ground_on
from autopar.formulate.pipelines.scenario import PipelineScenario
from autopar.formulate.pipelines.space import Pipelines
from autopar.formulate.pipelines.stages import block_indices
from autopar.formulate.scenario import Budget, StageScenario
from autopar.graph import OpGraph
from autopar.plan import MeshAxis, Request
from autopar.shard.experts import expert_counts

AnyScenario: TypeAlias = StageScenario | PipelineScenario


@dataclass(frozen=True)
class Space:
    """The plans there are for a model on a cluster."""

    graph: OpGraph
    cluster: Cluster
    pricer: Pricer
    request: Request

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """What is asked of all plans."""
        return parse_constraints(list(self.request.constraints))

    @property
    def pinned_devices(self) -> int | None:
        """The number of devices that a constraint asks for. Raises ConfigError where there are not that many."""
        used = next((int(c.value) for c in self.constraints if c.key == "devices" and not c.pattern), 0)
        if used > self.request.devices:
            raise ConfigError(f"constraint devices={used}: there are {self.request.devices}; give at most that.")
        return used or None

    def searched(self, devices: int, limit: int | None) -> Iterator[AnyScenario]:
        """All scenarios on so many devices whose plans hold at most `limit` bytes of tensors on each."""
        constraints = self.constraints
        _refuse_unmatched(constraints, self.graph)
        budget = Budget(limit, self.request.policy, self.request.optimizer)
        all_known = known = Known(self.pricer)
        pricer = self._in_step(devices)
        budget, known = self._capped(budget, pricer), known if pricer is self.pricer else known.priced(pricer)
        seen: set[tuple[int, ...]] = set()
        for mesh in search_meshes(pricer.cluster, devices) if self._one_stage(devices) else ():
            pins = pins_of_constraints(constraints, mesh, self.graph)
            if pins is None or _alike(mesh, pricer.cluster) in seen:
                continue
            seen.add(_alike(mesh, pricer.cluster))
            counts = self._microbatch_counts(mesh, pins[-1], constraints)
            yield from self._staged(mesh, pins, counts, pricer, budget, known)
        yield from self._pipelines(limit, all_known).searched(devices, constraints)

    def _staged(
        self,
        mesh: tuple[MeshAxis, ...],
        pins: Sequence[Pins],
        counts: Iterable[tuple[Pins, int]],
        pricer: Pricer,
        budget: Budget,
        known: Known,
    ) -> Iterator[StageScenario]:
        """One stage over a mesh with numbers of microbatches, each with the pins of the last layer."""
        for last, count in counts:
            setting = Setting(mesh, self.request.global_batch // count, count)
            yield StageScenario(known.runs(self.graph, [*pins[:-1], last]), setting, pricer, budget, known)

    def finer(self, scenario: AnyScenario) -> Iterator[AnyScenario]:
        """The scenarios with one prime factor of the devices on another axis, an axis for the batch and two free ones,
        and with about as many microbatches."""
        for sizes in finer_sizes(*_axes(scenario), scenario.chains.pricer.cluster):
            if sizes[0] > 1 or isinstance(scenario, PipelineScenario):  # one stage is looked at on any two axes
                yield from self._near(scenario, sizes)

    def grouped(self, scenario: AnyScenario) -> Iterator[AnyScenario]:
        """The scenarios in which ZeRO shards inside nodes, over which replicas are whole."""
        cluster = scenario.chains.pricer.cluster
        for sizes in node_sizes(*_axes(scenario), cluster):
            mesh = mesh_of(sizes)
            inside = frozenset(i for i, a in enumerate(mesh) if a.stride * a.size <= cluster.devices_per_node)
            yield from self._near(scenario, sizes, inside)

    def _near(
        self, scenario: AnyScenario, sizes: tuple[int, int, int], zero_axes: frozenset[int] | None = None
    ) -> Iterator[AnyScenario]:
        """A scenario on a mesh whose first axis, if longer than 1, splits the batch, with about as many microbatches;
        ZeRO over `zero_axes` of it alone."""
        near, constraints, mesh = scenario.chains, self.constraints, mesh_of(sizes)
        if isinstance(scenario, PipelineScenario):
            pipelines = self._pipelines(near.budget.limit_bytes, near.known)
            yield from pipelines.finer(scenario, mesh, sizes[0], constraints, zero_axes)
            return
        pins = pins_of_constraints(constraints, mesh, self.graph)
        if pins is None:
            return
        data_axes = frozenset({0} if sizes[0] > 1 else ())
        pins = [p if p.tensor_axes is not None else replace(p, data_axes=data_axes) for p in pins]
        pins = [replace(p, zero_axes=zero_axes) for p in pins]
        counts = list(self._microbatch_counts(mesh, pins[-1], constraints))
        few = nearest([count for _, count in counts], near.setting.num_microbatches)
        yield from self._staged(mesh, pins, [c for c in counts if c[1] in few], near.pricer, near.budget, near.known)

    def _pipelines(self, limit: int | None, known: Known) -> Pipelines:
        budget = Budget(limit, self.request.policy, self.request.optimizer)
        asked = self.request.memory_limit_bytes
        return Pipelines(self.graph, self.pricer, self.request.global_batch, budget, known, asked)

    def on_part(self, part: Cluster) -> Space:
        """The plans that use one part of a mixed cluster alone."""
        pricer = self.pricer.alone(part) if isinstance(self.pricer, MixedPricer) else self.pricer
        return replace(self, cluster=part, pricer=pricer, request=replace(self.request, devices=part.devices))

    def _one_stage(self, devices: int) -> bool:
        """Whether one stage is looked at: constraints allow it, or force it where devices are of different networks."""
        wanted = {c.value for c in self.constraints if c.key == "pp"}
        if any(c.key == "schedule" or (c.key == "virtual_stages" and c.value != "1") for c in self.constraints):
            return False  # they ask for a pipeline
        if not isinstance(self.pricer, MixedPricer) or "1" in wanted:
            return wanted <= {"1"}
        cluster = self.pricer.cluster
        used = {cluster.part_of_node(cluster.node_of_device(d)).network for d in range(devices)}
        return not wanted and len(used) == 1

    def _in_step(self, devices: int) -> Pricer:
        """What things cost where the first devices all work on one stage."""
        if not isinstance(self.pricer, MixedPricer):
            return self.pricer
        return ground_on(self.pricer, even_devices(1, devices)).pricers[0]

    def _capped(self, budget: Budget, pricer: Pricer) -> Budget:
        """The budget, but for no more than devices in step may hold."""
        if budget.limit_bytes is None or pricer is self.pricer:
            return budget
        holds = pricer.cluster.device.limit_bytes(self.request.memory_limit_bytes)
        return replace(budget, limit_bytes=min(budget.limit_bytes, holds))

    def _microbatch_counts(
        self, mesh: tuple[MeshAxis, ...], pins: Pins, constraints: Sequence[Constraint]
    ) -> Iterator[tuple[Pins, int]]:
        """Numbers of microbatches with the pins of the last layer, which makes the loss.

        Where `microbatch_size` is given they follow from how many ways that layer splits the batch.
        """
        batch = self.request.global_batch
        size = next((int(c.value) for c in constraints if c.key == "microbatch_size" and not c.pattern), None)
        if size is None:
            yield from ((pins, m) for m in range(1, batch + 1) if batch % m == 0 and self._may_split(m))
            return
        inner = [frozenset(range(first, len(mesh))) for first in range(len(mesh) + 1)]
        for axes in inner if pins.tensor_axes is None else [pins.tensor_axes]:
            count = microbatch_count(batch, prod(axis.size for i, axis in enumerate(mesh) if i not in axes), size)
            if count and self._may_split(count):
                yield replace(pins, tensor_axes=axes), count

    def _may_split(self, count: int) -> bool:
        return count == 1 or self.graph.separable

    def configured(self, config: ManualConfig, limit: int | None) -> AnyScenario:
        """The scenario of a hand-written plan. Raises ConfigError where it can't be laid out."""
        blocks = block_indices(self.graph)
        config = config.fit(self.cluster.devices, self.request.global_batch, len(blocks))
        _refuse_unsupported(config, self.graph, blocks)
        count = microbatch_count(self.request.global_batch, config.dp, config.microbatch_size) or 1
        if not self._may_split(count):
            raise ConfigError(
                f"microbatch_size={config.microbatch_size} makes {count} microbatches, but the batch can't be split in "
                f"time: {self.graph.why_not_separable}. "
                f"Give microbatch_size={-(-self.request.global_batch // config.dp)}."
            )
        batch = self.request.global_batch // count
        too_many = {d for d in (config.for_block(i, config.devices).dp for i in range(len(blocks))) if batch < d}
        if too_many:
            raise ConfigError(
                f"layers: a global microbatch of {batch} sequences can't be split over dp = "
                f"{max(too_many)}; give microbatch_size={max(too_many) * config.microbatch_size // config.dp} or more."
            )
        if config.pp > 1:
            return self._pipelines(limit, Known(self.pricer)).configured(config, count)
        mesh = config_mesh(config, len(blocks))
        pins = [
            pins_of(config, blocks.index(i) if i in blocks else None, mesh, len(blocks))
            for i in range(len(self.graph.layers))
        ]
        runs = layer_runs(self.graph, pins)
        setting = Setting(mesh, batch, count)
        budget, pricer = Budget(limit, self.request.policy, self.request.optimizer), self._in_step(config.devices)
        return StageScenario(runs, setting, pricer, self._capped(budget, pricer), Known(pricer))


def _axes(scenario: AnyScenario) -> tuple[tuple[int, ...], bool]:
    """Sizes of the mesh, and whether its first axis is for the batch."""
    return scenario.chains.setting.sizes, 0 in scenario.chains.runs[0].around.pins.data_axes


def _alike(mesh: tuple[MeshAxis, ...], cluster: Cluster) -> tuple[int, ...]:
    """Sizes of the axes, in any order where all are inside a node: there meshes are alike that differ in it."""
    sizes = [axis.size for axis in mesh]
    return tuple(sorted(sizes) if prod(sizes) <= cluster.devices_per_node else sizes)


def _refuse_unmatched(constraints: Sequence[Constraint], graph: OpGraph) -> None:
    """Say which patterns name no module that computes anything."""
    layers = range(len(graph.layers))
    mistakes = [
        f"constraint {c.pattern}:{c.key}: no module of the model has such a name; its layers are "
        f"{', '.join(layer.name for layer in graph.layers[:4])}, ..."
        for c in constraints
        if c.pattern and not any(covered_ops(c, graph, i) for i in layers)
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def _refuse_unsupported(config: ManualConfig, graph: OpGraph, blocks: Sequence[int]) -> None:
    """Say which keys this version, or the model, can't be planned with."""
    mistakes = [*config.offload_mistakes(), *_misfits(config, graph, blocks)]
    if config.framework != "autopar":
        mistakes.append(f"framework={config.framework}: predicted by `estimate` only; give autopar to plan")
    if mistakes:
        raise ConfigError(*mistakes)


def _misfits(config: ManualConfig, graph: OpGraph, blocks: Sequence[int]) -> Iterator[str]:
    """Degrees that the blocks of the model have no sequence or no experts for."""
    cuts = [graph.values[graph.cuts[i + side].main] for i in blocks for side in (0, 1)]
    lengths = {sequence_length(spec) for spec in cuts if has_sequence(spec)}
    if config.cp > 1 and not lengths:
        yield f"cp={config.cp}: no samples x tokens x width pass between the model's blocks; give cp=1"
    elif config.cp > 1 and config.cp > min(lengths):
        yield f"cp={config.cp}: a sequence has {min(lengths)} tokens; give at most that"
    counts = sorted(n for i in blocks for n in expert_counts(graph.classes[graph.layers[i].class_index]))
    if config.ep > 1 and not counts:
        yield (
            f"ep={config.ep}: no block multiplies a stack of matrices, one for each expert, by inputs of its own "
            "(experts that run as one operator can't be split); give ep=1"
        )
    elif uneven := [n for n in counts if n % config.ep]:
        yield f"ep={config.ep}: there are {uneven[0]} experts; give a divisor of that"
