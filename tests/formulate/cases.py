"""Models traced on meta, planners for them, and the layers of a planner's scenario laid out one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from autopar.cluster import Cluster, load_cluster
from autopar.cost.demand import price_demands
from autopar.cost.moves import relayout_demand
from autopar.cost.program import layer_demand, rerun_of, step_demands
from autopar.cost.roofline import RooflinePricer
from autopar.engine.eliminate import Elimination
from autopar.engine.label_graph import LabelGraph
from autopar.formulate.layers.call_prices import CallPrices
from autopar.formulate.layers.labels import LabelSpace, label_space
from autopar.formulate.layers.mode_costs import Part, label_graph
from autopar.formulate.layers.rates import ParameterRates
from autopar.formulate.layers.relayout_prices import RelayoutPrices
from autopar.formulate.layers.runs import LayerRun, layer_runs
from autopar.formulate.layers.storing import gathered_again, storage_costs
from autopar.formulate.layers.tables import Mode, Setting, passing_seconds, space_costs
from autopar.formulate.pins import Pins
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph, follow_layout, local_shape
from autopar.plan import POLICIES, LayerStrategy, Request, data_axes_of
from autopar.shard.lower import lower
from autopar.shard.program import Program
from autopar.shard.storage import parameter_storage
from autopar.trace import trace
from autopar.trace.models.spec import load_model

SIZES = "hidden=512,heads=8,vocab=4096,seq=256"
SPECS = {
    "gpt": f"gpt:layers=4,{SIZES},tied=0",
    "heavy head": "gpt:layers=16,hidden=1024,heads=16,vocab=50304,seq=256,tied=0",
    "gpt-40": f"gpt:layers=40,{SIZES},tied=0",
    "one-token": "gpt:layers=2,hidden=32,heads=2,vocab=64,seq=1",
    "tied": f"gpt:layers=2,{SIZES},tied=1",
    "tied-20": f"gpt:layers=20,{SIZES},tied=1",
    "llama": f"llama:layers=2,kv_heads=4,{SIZES}",
}


class Mlp(nn.Module):
    """Three wide linear layers and a cross-entropy: no repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 1024)
        self.second = nn.Linear(1024, 1024)
        self.last = nn.Linear(1024, 128)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return nn.functional.cross_entropy(self.last(torch.tanh(self.second(hidden))), labels)


class Paired(nn.Module):
    """Two wide linear layers that read the same elementwise result."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 8192), nn.Linear(256, 8192)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.before(x))
        made: Tensor = (self.first(y) * self.second(y)).sum(1, keepdim=True)
        return (made + x).square().mean()


@cache
def traced(name: str) -> OpGraph:
    """The trace of `mlp`, `paired` or of one of `SPECS` with bfloat16 computation."""
    if name == "paired":
        with torch.device("meta"):
            return trace(Paired(), (torch.zeros(2, 256),), compute_dtype="bfloat16")
    if name == "mlp":
        with torch.device("meta"):
            return trace(
                Mlp(), {"x": torch.zeros(2, 256), "labels": torch.zeros(2, dtype=torch.int64)}, compute_dtype="bfloat16"
            )
    loaded = load_model(SPECS[name])
    return trace(loaded.model, loaded.inputs, compute_dtype="bfloat16")


@cache
def cluster_of(name: str) -> Cluster:
    """A shipped cluster."""
    return load_cluster(name)


def planner(
    model: str,
    cluster: str = "2xa100-80gb",
    batch: int = 8,
    limit_bytes: int | None = None,
    constraints: tuple[str, ...] = (),
) -> Planner:
    """A planner that prices by roofline."""
    where = cluster_of(cluster)
    request = Request(
        model, where.name, where.device.name, where.devices, batch, "bf16", POLICIES["bf16"], "adamw",
        memory_limit_bytes=limit_bytes, constraints=constraints,
    )  # fmt: skip
    return Planner(traced(model), where, RooflinePricer(where), request)


@dataclass(frozen=True)
class Laid:
    """One run of a model with its choices laid out and priced in `modes`."""

    run: LayerRun
    setting: Setting
    pricer: RooflinePricer
    rates: ParameterRates
    space: LabelSpace
    modes: list[Mode]
    graph: LabelGraph

    def strategy(self, mode: int, labels: Sequence[int]) -> LayerStrategy:
        """The strategy that labels stand for in a mode."""
        return self.space.strategy(dict(enumerate(labels)), self.modes[mode].zero, self.modes[mode].recompute)


def legal_entries(solved: Elimination) -> np.ndarray[tuple[int, int], np.dtype[np.intp]]:
    """Indices (mode, entry, exit[, tied]) of the finite entries of a table, one a row."""
    return np.argwhere(np.isfinite(solved.table))


def modes_of(space: LabelSpace, run: LayerRun, byte_price_s: float = 0.0) -> list[Mode]:
    """Every ZeRO level over every set of data axes that a state has, with every kind of recomputation."""
    batch_dim = run.around.entry.batch_dim
    axes = {data_axes_of(state, batch_dim) for state in space.variables[space.entry].layouts} - {()}
    ways = [(0, ()), *((zero, a) for zero in (1, 2, 3) for a in sorted(axes))]
    return [Mode(zero, a, again, byte_price_s) for zero, a in ways for again in run.around.pins.recompute]


def lay_out(run: LayerRun, setting: Setting, pricer: RooflinePricer) -> Laid:
    """Lay out and price one run."""
    relayouts = RelayoutPrices(pricer, setting.mesh)
    rates = ParameterRates(pricer, setting.mesh, POLICIES["bf16"], "adamw", setting.num_microbatches, 1 << 20)
    space = label_space(run.layer, run.around, setting.sizes, setting.batch)
    costs = space_costs(space, [run.around], setting, CallPrices(pricer), relayouts)
    modes = modes_of(space, run)
    passing = passing_seconds(space, run.around, setting, relayouts)
    stored = storage_costs(space, run.around, setting, modes, rates)
    return Laid(run, setting, pricer, rates, space, modes, label_graph([Part(costs, passing, setting, modes, stored)]))


def laid_out(model: str, cluster: str, setting: Setting) -> Iterator[Laid]:
    """Every run of the model."""
    graph, pricer = traced(model), RooflinePricer(cluster_of(cluster))
    for run in layer_runs(graph, [Pins()] * len(graph.layers)):
        yield lay_out(run, setting, pricer)


# --- what a labelling's program costs -----------------------------------------------------------------------------


def lowered(laid: Laid, strategy: LayerStrategy) -> Program:
    """The program of the run's layer."""
    around = laid.run.around
    return lower(
        laid.run.layer, strategy, laid.setting.sizes, around.entry, around.leave,
        main_input=around.main_input, main_output=around.main_output,
    )  # fmt: skip


def step_s(laid: Laid, strategy: LayerStrategy) -> float:
    """Seconds a step of the lowered layer: its program in every microbatch, its parameters at their rates."""
    program, setting, around = lowered(laid, strategy), laid.setting, laid.run.around
    demands = [layer_demand(program, laid.run.layer, setting.batch, setting.mesh)]
    for value in around.passing:
        front = strategy.entry if value.main_in_front else follow_layout(around.entry, strategy.entry, value.spec)
        behind = strategy.exit if value.main_behind else follow_layout(around.leave, strategy.exit, value.spec)
        demands.append(relayout_demand(value.spec, front, behind, setting.mesh, setting.batch))
    times = price_demands(demands, laid.pricer)
    again = price_demands(
        [rerun_of(program, step_demands(program, laid.run.layer, setting.batch, setting.mesh))], laid.pricer
    )
    micro = float(times.forward_s.sum() + times.backward_s.sum() + again.forward_s[0])
    return setting.num_microbatches * micro + _parameters_s(laid, strategy, program)


def _parameters_s(laid: Laid, strategy: LayerStrategy, program: Program) -> float:
    """Seconds a step of keeping the parameters that the layer owns, from the layouts the program stores them in."""
    total, data_axes = 0.0, strategy.data_axes(laid.run.around.entry.batch_dim) if strategy.zero else ()
    for name, owned in zip(laid.run.layer.params, laid.run.around.owned, strict=True):
        spec, layout = laid.run.layer.values[name], program.layouts[name]
        if owned:
            again = gathered_again(laid.run.layer, laid.run.around, name, laid.setting.staged)
            rate = laid.rates.of(parameter_storage(spec, layout, data_axes, strategy.zero), spec, again)
            elements = prod(local_shape(spec, 1, layout, laid.setting.sizes))
            total += elements * (laid.setting.num_microbatches * rate.micro_s + rate.step_s)
    return total
