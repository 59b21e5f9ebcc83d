"""Exact seconds and bytes of one layer under one strategy: what search, estimate and check all add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.cost.activations import Activations, activations
from autopar.cost.demand import Demand
from autopar.cost.host import saved_demand, step_demand
from autopar.cost.layer import LayerFigures, LayerWork, figures_of
from autopar.cost.memory import layer_memory
from autopar.cost.moves import relayout_demand
from autopar.cost.pricer import Pricer
from autopar.cost.program import rerun_of, step_demands
from autopar.cost.states import HeldParameter, Uses, held_parameters
from autopar.cost.storages import Storages
from autopar.cost.sync import optimizer_demand, sync_demand
from autopar.formulate.layers.call_prices import CallPrices
from autopar.formulate.layers.labels import at_cut
from autopar.formulate.layers.runs import LayerRun, trained_elements
from autopar.formulate.layers.tables import Setting
from autopar.formulate.pipelines.stages import batch_bytes
from autopar.graph import LayerClass
from autopar.plan import DtypePolicy, LayerStrategy
from autopar.shard.gathering import backward_reads_parameters
from autopar.shard.lower import lower
from autopar.shard.program import Program
from autopar.shard.storage import ParameterStorage


@dataclass(frozen=True, eq=False)
class Asked:
    """What the calls of a lowered layer ask for in a setting, and what of them runs again in the backward pass."""

    calls: Demand
    rerun: Demand

    @classmethod
    def of(cls, program: Program, layer: LayerClass, setting: Setting, known: CallPrices | None = None) -> Asked:
        """Find it; `known` may have the demands of calls."""
        where = layer, setting.batch, setting.mesh
        each = step_demands(program, *where, None if known is None else lambda c: known.demand(c, program, *where))
        return cls(Demand.joined(each), rerun_of(program, each))


@dataclass(frozen=True, eq=False)
class LoweredLayer:
    """A layer of a run lowered under a strategy: what it asks for and keeps, whatever its ZeRO level."""

    program: Program
    asked: Asked
    passing: Demand
    activations: Activations

    @classmethod
    def of(
        cls, run: LayerRun, strategy: LayerStrategy, setting: Setting, storages: Storages, asked: Asked
    ) -> LoweredLayer:
        """Of the strategy's program, which lies in `storages`; strategies that differ in ZeRO alone come to the same.

        Runs of one class differ in what they keep for others.
        """
        around = run.around
        walked = activations(
            storages.program, setting.batch, around.held, run.unread, around.promised, setting.num_microbatches > 1,
            offloaded=strategy.offload == "activations", storages=storages,
        )  # fmt: skip
        return cls(storages.program, asked, _passing(run, strategy, setting), walked)


def lowered(run: LayerRun, strategy: LayerStrategy, setting: Setting) -> LoweredLayer:
    """Lower a layer of `run`."""
    around = run.around
    program = lower(
        run.layer, strategy, setting.sizes, around.entry, around.leave,
        main_input=around.main_input, main_output=around.main_output,
    )  # fmt: skip
    return LoweredLayer.of(run, strategy, setting, Storages(program), Asked.of(program, run.layer, setting))


def layer_figures(
    run: LayerRun,
    strategy: LayerStrategy,
    setting: Setting,
    pricer: Pricer,
    policy: DtypePolicy,
    optimizer: str,
    known: LoweredLayer | None = None,
) -> LayerFigures:
    """Price a layer of `run` under `strategy` from its lowered program, which may be `known`."""
    return figures_of(layer_work(run, strategy, setting, policy, optimizer, known), pricer)


def layer_work(
    run: LayerRun,
    strategy: LayerStrategy,
    setting: Setting,
    policy: DtypePolicy,
    optimizer: str,
    known: LoweredLayer | None = None,
) -> LayerWork:
    """What a layer of `run` under `strategy` asks for."""
    around, layer = run.around, run.layer
    known = known or lowered(run, strategy, setting)
    uses = Uses(_unmarked(layer, around.owned), _unmarked(layer, around.graded),
                frozenset(() if setting.staged else around.tied))  # fmt: skip
    zero_axes = strategy.zero_axes(around.entry.batch_dim, setting.sizes)
    parameters = held_parameters(known.program, zero_axes, strategy.zero, uses)
    turns = around.last and not setting.staged  # its backward pass follows at once
    again = backward_reads_parameters(known.program)
    micro, step = _sync(parameters, setting, policy, again and not turns)
    updated = [prod(p.stored) for p in parameters if p.owned and p.trained]
    hosted = strategy.offload == "optimizer"
    memory = layer_memory(
        known.program, setting.batch, policy, optimizer, parameters, known.activations, hosted=hosted,
        staged=setting.staged, model_share=_times_own(run, run.model_elements) / setting.groups,
        next_elements=run.elements_before if run.count == 1 else None, again=again,
    )  # fmt: skip
    memory = replace(memory, inputs=_inputs_bytes(run, strategy, setting))
    update = (step_demand if hosted else optimizer_demand)(updated, policy, optimizer)
    calls, moved = known.asked.calls, known.activations.to_host
    calls = Demand.joined([calls, saved_demand(moved)]) if moved else calls
    return LayerWork(calls, known.passing, micro, known.asked.rerun, step, update, memory)


def _unmarked(layer: LayerClass, marks: Sequence[bool]) -> frozenset[str]:
    return frozenset(name for name, marked in zip(layer.params, marks, strict=True) if not marked)


def _inputs_bytes(run: LayerRun, strategy: LayerStrategy, setting: Setting) -> int:
    """Bytes of a device's rows of the whole batch, where `run` is the first."""
    ways = prod(setting.sizes[a] for a in strategy.data_axes(run.around.entry.batch_dim))
    return batch_bytes(run.inputs, setting.batch * setting.num_microbatches, ways)


def _times_own(run: LayerRun, elements: int) -> float:
    """How many times the trained parameters of one layer of the run so many elements are; 1 where it has none."""
    mine = trained_elements(run.layer)
    return elements / mine if mine else 1.0


def _passing(run: LayerRun, strategy: LayerStrategy, setting: Setting) -> Demand:
    """Demand of relaying, in a microbatch, the values that pass the layer by."""
    around, parts = run.around, []
    for value in around.passing:
        (source,) = at_cut(value.spec, around.entry, (strategy.entry,), value.main_in_front)
        (target,) = at_cut(value.spec, around.leave, (strategy.exit,), value.main_behind)
        parts.append(relayout_demand(value.spec, source, target, setting.mesh, setting.batch))
    return Demand.joined(parts)


def _sync(
    parameters: Sequence[HeldParameter], setting: Setting, policy: DtypePolicy, again: bool
) -> tuple[Demand, Demand]:
    """Demand of synchronising a layer's parameters, those kept alike together, in every microbatch and once a step.

    `again`: whether ZeRO 3 gathers those that are not shared for the backward pass, too.
    """
    elements: dict[tuple[ParameterStorage, bool, bool], int] = defaultdict(int)
    for p in parameters:
        elements[p.storage, p.trained, again and not p.shared] += prod(p.shape) if p.owned else 0
    found = [
        sync_demand(count, storage, trained, setting.mesh, policy, setting.num_microbatches, setting.staged, twice)
        for (storage, trained, twice), count in elements.items()
    ]
    return Demand.joined([f.micro for f in found]), Demand.joined([f.step for f in found])
