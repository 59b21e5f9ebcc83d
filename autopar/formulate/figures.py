"""Exact seconds and bytes of one layer under one strategy: what search, estimate and check all add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from autopar.cost.demand import Demand, DemandTimes, price_demands
from autopar.cost.memory import LayerMemory, layer_memory
from autopar.cost.pricer import Pricer, Source
from autopar.cost.program import layer_demand
from autopar.cost.sync import exposed_s, optimizer_demand, sync_demand
from autopar.formulate.labels import at_cut
from autopar.formulate.runs import LayerRun
from autopar.formulate.tables import RelayoutPrices, Setting, zero_of
from autopar.graph import BROADCAST, local_shape
from autopar.plan import DtypePolicy, LayerStrategy
from autopar.shard.lower import lower
from autopar.shard.program import Program


@dataclass(frozen=True)
class LayerFigures:
    """One layer on one device. `micro_s` in every microbatch, `step_s` once a step; both split by kind and by source.

    Kinds: `compute`, `recompute`, `communication` (exposed), `optimizer`.
    """

    micro_s: float
    step_s: float
    memory: LayerMemory
    micro_by_kind_s: Mapping[str, float] = field(hash=False)
    step_by_kind_s: Mapping[str, float] = field(hash=False)
    micro_by_source_s: Mapping[Source, float] = field(hash=False)
    step_by_source_s: Mapping[Source, float] = field(hash=False)


def layer_figures(
    run: LayerRun,
    strategy: LayerStrategy,
    setting: Setting,
    pricer: Pricer,
    relayouts: RelayoutPrices,
    policy: DtypePolicy,
    optimizer: str,
) -> LayerFigures:
    """Price a layer of `run` under `strategy` from its lowered program."""
    around, layer = run.around, run.layer
    program = lower(
        layer, strategy, setting.sizes, around.entry, around.leave,
        main_input=around.main_input, main_output=around.main_output,
    )  # fmt: skip
    data_axes = strategy.data_axes(around.entry.batch_dim)
    groups = _parameter_groups(run, program, data_axes, setting)
    micro, step = _sync(groups, strategy.zero, data_axes, setting, policy)
    ways = prod(setting.mesh[a].size for a in data_axes) if strategy.zero else 1
    updated = [-(-n // (ways if data else 1)) for (data, _), sizes in groups.items() for n in sizes]
    parts = [
        layer_demand(program, layer, setting.batch, setting.mesh), micro, step,
        optimizer_demand(updated, policy, optimizer),
    ]  # fmt: skip
    times = price_demands(parts, pricer)
    memory = layer_memory(
        program, setting.batch, policy, optimizer, strategy.zero, ways, strategy.recompute, held=run.held,
        foreign=frozenset(name for name, owned in zip(layer.params, around.owned, strict=True) if not owned),
        unread=run.unread, accumulates=setting.num_microbatches > 1,
    )  # fmt: skip
    passing = _passing_s(run, strategy, setting, relayouts)
    return _add_up(times, passing, strategy.recompute == "full", memory, pricer.cluster.device.overlap)


def _add_up(times: DemandTimes, passing_s: float, again: bool, memory: LayerMemory, overlap: float) -> LayerFigures:
    forward, backward = times.forward_compute_s.tolist(), times.backward_compute_s.tolist()
    sent, returned = times.forward_communication_s.tolist(), times.backward_communication_s.tolist()
    compute = forward[0] + backward[0]
    recompute = forward[0] if again else 0.0
    gathered = exposed_s(sent[1] + returned[1], compute + recompute, overlap)
    moved = sent[0] * (1 + again) + returned[0] + gathered + passing_s
    micro = {"compute": compute + forward[1] + backward[1], "recompute": recompute, "communication": moved}
    step = {"compute": forward[2], "communication": sent[2], "optimizer": forward[3]}
    micro_sources: dict[Source, float] = {}
    step_sources: dict[Source, float] = {}
    for source, seconds in times.by_source.items():
        micro_sources[source] = float(seconds[0] + seconds[1])
        step_sources[source] = float(seconds[2] + seconds[3])
    return LayerFigures(sum(micro.values()), sum(step.values()), memory, micro, step, micro_sources, step_sources)


def _passing_s(run: LayerRun, strategy: LayerStrategy, setting: Setting, relayouts: RelayoutPrices) -> float:
    """Seconds of relaying, in a microbatch, the values that pass the layer by."""
    total, around = 0.0, run.around
    for value in around.passing:
        source = at_cut(value.spec, around.entry, (strategy.entry,), value.main_in_front)
        target = at_cut(value.spec, around.leave, (strategy.exit,), value.main_behind)
        total += sum(float(t[0, 0]) for t in relayouts.table(value.spec, source, target, setting.batch))
    return total


Axes = tuple[int, ...]


def _parameter_groups(
    run: LayerRun, program: Program, data_axes: Axes, setting: Setting
) -> dict[tuple[Axes, Axes], list[int]]:
    """Local sizes (elements) of the trained parameters this layer owns, by the data and further axes they are B on."""
    groups: dict[tuple[Axes, Axes], list[int]] = defaultdict(list)
    for name, owned in zip(run.layer.params, run.around.owned, strict=True):
        spec, layout = run.layer.values[name], program.layouts[name]
        if owned and spec.requires_grad:
            summed = [a for a, p in enumerate(layout) if p == BROADCAST]
            key = tuple(a for a in summed if a in data_axes), tuple(a for a in summed if a not in data_axes)
            groups[key].append(prod(local_shape(spec.shape_at(setting.batch), layout, setting.sizes)))
    return groups


def _sync(
    groups: Mapping[tuple[Axes, Axes], list[int]], zero: int, data_axes: Axes, setting: Setting, policy: DtypePolicy
) -> tuple[Demand, Demand]:
    """Demand of synchronising all groups, in every microbatch and once a step."""
    found = [
        sync_demand(
            sum(sizes), zero_of(zero, data, data_axes), data, further, setting.mesh, policy, setting.num_microbatches
        )
        for (data, further), sizes in groups.items()
    ]
    return Demand.joined([f.micro for f in found]), Demand.joined([f.step for f in found])
