"""A plan in which one device is slower than the others, which wait for it."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from autopar.errors import ConfigError
from autopar.formulate.chains.columns import Column
from autopar.formulate.record.assemble import Solved
from autopar.formulate.record.changed import changed
from autopar.formulate.scenario import SolvedScenario


def with_straggler(solved: Solved, factor: float) -> Solved:
    """One device of the stages that work longest takes `factor` times as long for all but what it sends.

    Raises ConfigError for factors below 1.
    """
    if not (isfinite(factor) and factor >= 1):
        raise ConfigError(f"straggler={factor}: give how many times as long a device takes, 1 or more")
    busiest = 0 if isinstance(solved, SolvedScenario) else solved.time.simulation.busiest

    def slowed(group: int, _: int, column: Column) -> Column:
        return replace(column, figures=column.figures.slowed(factor)) if group == busiest else column

    return changed(solved, slowed)
