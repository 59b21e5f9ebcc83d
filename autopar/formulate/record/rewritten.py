"""Plans of which something is set once all else is chosen: the same choices, with the seconds and bytes it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.formulate.chains.columns import Column
from autopar.formulate.chains.figures import layer_figures
from autopar.formulate.pipelines.scenario import PipelineScenario
from autopar.formulate.record.assemble import Solved
from autopar.formulate.record.changed import changed
from autopar.formulate.scenario import StageScenario
from autopar.plan import DtypePolicy, LayerStrategy


def rewritten(
    solved: Solved,
    scenario: StageScenario | PipelineScenario,
    rewrite: Callable[[LayerStrategy], LayerStrategy],
    policy: DtypePolicy,
    optimizer: str,
) -> Solved:
    """The solution of `scenario` with every layer's strategy rewritten."""
    places = (scenario,) if isinstance(scenario, StageScenario) else scenario.books  # of each group of devices

    def moved(group: int, run: int, column: Column) -> Column:
        chains, strategy = places[group].chains, rewrite(column.strategy)
        figures = layer_figures(chains.runs[run], strategy, chains.setting, chains.pricer, policy, optimizer)
        return replace(column, strategy=strategy, figures=figures)

    return changed(solved, moved)


def with_offload(
    solved: Solved, scenario: StageScenario | PipelineScenario, kind: str, policy: DtypePolicy, optimizer: str
) -> Solved:
    """The solution of `scenario` with `kind` (activations, optimizer) kept on the host by all layers."""
    return rewritten(solved, scenario, lambda strategy: replace(strategy, offload=kind), policy, optimizer)
