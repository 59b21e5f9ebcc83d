"""Pipelines written by hand: plans of one stage, each made for a group's devices, cut into stages."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, PlanRecord, Request, StagePlan
from autopar.schedules import group_of


def one_stage(graph: OpGraph, text: str, devices: int, global_batch: int, dtype: str = "fp64") -> PlanRecord:
    """The plan of a written configuration on `devices` devices."""
    cluster = load_cluster(f"{devices}xa100-80gb")
    request = Request("test", cluster.name, "cpu", devices, global_batch, dtype, POLICIES[dtype], "adamw")
    return Planner(graph, cluster, RooflinePricer(cluster), request).plan(ManualConfig.parse(text))


def staged(
    graph: OpGraph,
    texts: tuple[str, ...],
    counts: tuple[int, ...],
    schedule: str,
    microbatches: int,
    group_size: int = 1,
    global_batch: int = 16,
    dtype: str = "fp64",
) -> PlanRecord:
    """A pipeline whose stage i has `counts[i]` layers, run as the configuration of its group says.

    There are as many groups of devices as `texts`.
    """
    groups = len(texts)
    plans = [one_stage(graph, text, group_size, global_batch, dtype) for text in texts]
    stages: list[StagePlan] = []
    for k, count in enumerate(counts):
        group = group_of(schedule, k, groups)
        stage = cut(plans[group].stages[0], sum(counts[:k]), count, group * group_size)
        stages.append(taking(stage, stages[-1]) if stages else stage)
    return replace(
        plans[0], request=replace(plans[0].request, devices=groups * group_size), stages=tuple(stages),
        num_microbatches=microbatches, pp_degree=groups, schedule=schedule,
        global_microbatch=global_batch // microbatches, placement=tuple(range(groups * group_size)),
    )  # fmt: skip


def taking(stage: StagePlan, before: StagePlan) -> StagePlan:
    """`stage` with an entry of its first layer that is the exit of the stage before.

    Both meshes must have equal axes, or the layouts be the same on all of them.
    """
    leaves = before.strategies[before.assignment[-1]].exit
    first = stage.strategies[stage.assignment[0]]
    enters = leaves if len(leaves) == len(first.entry) else (leaves[:1] * len(first.entry))
    strategies = (*stage.strategies, replace(first, entry=enters))
    return replace(stage, strategies=strategies, assignment=(len(strategies) - 1, *stage.assignment[1:]))


def cut(stage: StagePlan, first: int, count: int, offset: int) -> StagePlan:
    """`count` layers of `stage` from layer `first` on, on devices `offset` further."""
    assignment = stage.assignment[first : first + count]
    kept = tuple(dict.fromkeys(assignment))
    return replace(
        stage, first_layer=first, devices=tuple(d + offset for d in stage.devices),
        strategies=tuple(stage.strategies[i] for i in kept), assignment=tuple(kept.index(i) for i in assignment),
    )  # fmt: skip
