"""Under tight limits a scenario finds what trying strategies at random does not beat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost.roofline import RooflinePricer
from autopar.engine.eliminate import eliminate
from autopar.engine.stack import solve_stack
from autopar.engine.stack_problem import Run
from autopar.formulate.chains.columns import Budget, Column, choices_of, free_problem
from autopar.formulate.chains.figures import layer_figures
from autopar.formulate.chains.known import Known
from autopar.formulate.layers.runs import LayerRun, layer_runs
from autopar.formulate.layers.tables import Setting
from autopar.formulate.mesh import mesh_of
from autopar.formulate.pins import Pins
from autopar.formulate.scenario import SolvedScenario, StageScenario
from autopar.graph import Layout
from autopar.plan import POLICIES
from tests.formulate.cases import cluster_of, lay_out, traced
from tests.formulate.test_tables import noise

CLUSTER = "2xa100-80gb"
POLICY = POLICIES["bf16"]
DRAWS, ENTRIES = 30, 12


def runs_of() -> tuple[LayerRun, ...]:
    graph = traced("mlp")
    return layer_runs(graph, [Pins()] * len(graph.layers))


def solved(setting: Setting, limit_bytes: int | None) -> SolvedScenario:
    """The answer of the scenario under a limit."""
    pricer = RooflinePricer(cluster_of(CLUSTER))
    return StageScenario(runs_of(), setting, pricer, Budget(limit_bytes, POLICY, "adamw"), Known(pricer)).solve()


def drawn(run: LayerRun, setting: Setting) -> list[Column]:
    """Strategies of a layer that are the cheapest when all its choices cost something at random, priced."""
    pricer, rng = RooflinePricer(cluster_of(CLUSTER)), np.random.default_rng(0)
    laid, found = lay_out(run, setting, pricer), {}
    for _ in range(DRAWS):
        table = eliminate(replace(laid.graph, unary=noise(laid.graph, rng)))
        for k, *kept in rng.permutation(np.argwhere(np.isfinite(table.table)))[:ENTRIES].tolist():
            strategy = laid.strategy(k, table.decode(k, kept))
            mode = laid.modes[k]
            if not mode.zero or mode.data_axes == strategy.data_axes(run.around.entry.batch_dim):
                found[repr(strategy)] = strategy
    return [Column(s, layer_figures(run, s, setting, pricer, POLICY, "adamw"), -1) for s in found.values()]


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_nothing_at_random_fits_and_is_faster(share: float) -> None:
    """Some hundred random strategies of each of three layers, beside those that were looked at, make nothing faster:
    also where temporaries, which no price of bytes counts, are what doesn't fit."""
    setting = Setting(mesh_of((2,)), 1024, 4)
    free = solved(setting, None).solution
    assert free.peak_bytes is not None
    limit = int(share * free.peak_bytes)
    answer, runs = solved(setting, limit), runs_of()
    columns = [[*own, *drawn(run, setting)] for own, run in zip(answer.columns, runs, strict=True)]
    states: dict[Layout, int] = {}
    for own in columns:
        for column in own:
            states.setdefault(column.strategy.entry, len(states))
            states.setdefault(column.strategy.exit, len(states))
    choices = [Run(run.count, choices_of(own, states)) for run, own in zip(runs, columns, strict=True)]
    best = solve_stack(free_problem(tuple(choices), setting.num_microbatches, limit))
    assert min(map(len, columns)) > 100
    assert answer.solution.objective_s <= best.objective_s * 1.005
