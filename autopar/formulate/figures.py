"""Exact seconds and bytes of one layer under one strategy: what search, estimate and check all add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod

from autopar.cost.demand import Demand
from autopar.cost.layer import LayerFigures, LayerWork, figures_of
from autopar.cost.memory import layer_memory
from autopar.cost.moves import relayout_demand
from autopar.cost.pricer import Pricer
from autopar.cost.program import layer_demand
from autopar.cost.sync import optimizer_demand, sync_demand
from autopar.formulate.labels import at_cut
from autopar.formulate.runs import LayerRun
from autopar.formulate.tables import Setting, zero_of
from autopar.graph import BROADCAST, local_shape
from autopar.plan import DtypePolicy, LayerStrategy
from autopar.shard.lower import lower
from autopar.shard.program import Program


def layer_figures(
    run: LayerRun,
    strategy: LayerStrategy,
    setting: Setting,
    pricer: Pricer,
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
    memory = layer_memory(
        program, setting.batch, policy, optimizer, strategy.zero, ways, strategy.recompute, held=run.held,
        foreign=frozenset(name for name, owned in zip(layer.params, around.owned, strict=True) if not owned),
        unread=run.unread, accumulates=setting.num_microbatches > 1,
    )  # fmt: skip
    work = LayerWork(
        layer_demand(program, layer, setting.batch, setting.mesh), _passing(run, strategy, setting), micro, step,
        optimizer_demand(updated, policy, optimizer), strategy.recompute == "full", memory,
    )  # fmt: skip
    return figures_of(work, pricer)


def _passing(run: LayerRun, strategy: LayerStrategy, setting: Setting) -> Demand:
    """Demand of relaying, in a microbatch, the values that pass the layer by."""
    around, parts = run.around, []
    for value in around.passing:
        (source,) = at_cut(value.spec, around.entry, (strategy.entry,), value.main_in_front)
        (target,) = at_cut(value.spec, around.leave, (strategy.exit,), value.main_behind)
        parts.append(relayout_demand(value.spec, source, target, setting.mesh, setting.batch))
    return Demand.joined(parts)


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
