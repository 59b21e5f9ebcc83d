"""Plans and estimates that several tests look at, each made once; what a record says of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

from autopar.formulate.config import ManualConfig
from autopar.formulate.layers.runs import LayerRun, layer_runs
from autopar.formulate.pins import Pins
from autopar.plan import LayerStrategy, PlanRecord
from autopar.shard.lower import lower_layer
from autopar.shard.program import Program
from tests.formulate.cases import planner, traced

BATCHES = {"mlp": 4096}
"""Global batches of models whose batch is not 8."""
ONE_STAGE = ("exclude=pp",)
"""Constraint that leaves pipelines out."""


@cache
def plan_of(model: str, cluster: str = "2xa100-80gb", limit_bytes: int | None = None, *constraints: str) -> PlanRecord:
    """The plan of a model in one stage."""
    return planner(model, cluster, BATCHES.get(model, 8), limit_bytes, (*ONE_STAGE, *constraints)).plan()


@cache
def estimate_of(model: str, cluster: str, text: str) -> PlanRecord:
    """The estimate of a hand-written plan."""
    return planner(model, cluster, BATCHES.get(model, 8)).estimate(ManualConfig.parse(text))


@cache
def estimates_of(model: str, cluster: str) -> tuple[PlanRecord, ...]:
    """Estimates of every uniform configuration that the cluster allows, with the larger microbatches."""
    maker = planner(model, cluster, BATCHES.get(model, 8))
    return tuple(maker.estimate(c) for c in uniform_configs(maker.cluster.devices, BATCHES.get(model, 8)))


def uniform_configs(devices: int, batch: int) -> Iterator[ManualConfig]:
    """Every (dp, tp, sp, zero, recompute) on all devices with each of the three largest microbatch sizes."""
    for tp in divisors(devices):
        dp = devices // tp
        for size in [] if batch % dp else divisors(batch // dp)[-3:]:
            for sp in (0, 1) if tp > 1 else (0,):
                for zero in range(4) if dp > 1 else (0,):
                    for recompute in ("none", "full"):
                        yield ManualConfig(dp=dp, tp=tp, sp=sp, zero=zero, recompute=recompute, microbatch_size=size)


def divisors(number: int) -> list[int]:
    """Numbers that divide `number`, 1 first."""
    return [d for d in range(1, number + 1) if number % d == 0]


# --- layers of a record -------------------------------------------------------------------------------------------


def runs_of(model: str) -> tuple[LayerRun, ...]:
    """Runs of equal layers where nothing is pinned."""
    graph = traced(model)
    return layer_runs(graph, [Pins()] * len(graph.layers))


def sizes_of(record: PlanRecord) -> tuple[int, ...]:
    """Sizes of the mesh axes."""
    return tuple(axis.size for axis in record.stages[0].mesh)


def strategies_of(record: PlanRecord) -> list[LayerStrategy]:
    """The strategy of each layer."""
    stage = record.stages[0]
    return [stage.strategies[i] for i in stage.assignment]


def programs_of(record: PlanRecord, model: str) -> list[Program]:
    """The lowered program of each layer."""
    return [lower_layer(traced(model), i, s, sizes_of(record)) for i, s in enumerate(strategies_of(record))]


def ways(program: Program, name: str, dim: int | None = None) -> int:
    """Into how many parts a value is split (on dim `dim` if given)."""
    layout = program.layouts[name]
    return prod(
        size for size, p in zip(program.axis_sizes, layout, strict=True) if p >= 0 and (dim is None or p == dim)
    )


def matrix_ways(program: Program, having: str = "") -> set[int]:
    """Into how many parts the matrices among the layer's parameters are split, those with `having` in their name."""
    names = [n for n in program.params if len(program.values[n].shape) >= 2 and having in n]
    return {ways(program, name) for name in names}
