"""Files of stages run in place of the plan's own code."""

from __future__ import annotations

import hashlib
import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopar.emit.groups import StageGroups
from autopar.emit.source.runtime import Axes, Here, Submodule
from autopar.errors import EmitError
from autopar.plan import PlanRecord
from autopar.shard.program import Program


def stage_file(folder: Path, number: int) -> Path:
    """Where the source of a stage is."""
    return folder / f"stage_{number}.py"


def digest(record: PlanRecord) -> str:
    """What a file must agree with to be run: the stages, the batch and the model."""
    chosen = [record.fingerprint.graph, record.global_microbatch, *map(asdict, record.stages)]
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


class LayerSource:
    """A layer's function from a file; takes the place of `ProgramCode`."""

    def __init__(
        self, program: Program, function: Callable[..., Any], evaluating: Callable[..., Any], batch: int
    ) -> None:
        self.program, self.makes_again = program, program.light
        self._functions = {True: function, False: evaluating}
        self._batch = batch

    def at(self, batch: int, training: bool) -> Callable[..., Any]:
        """The function. Raises EmitError at another batch than it was written for."""
        if batch != self._batch:
            raise EmitError(
                f"the source was written for global microbatches of {self._batch} samples, this one has {batch}. Pass "
                "batches of the plan's size, or run the plan without `source`."
            )
        return self._functions[training]


class StageSource:
    """The file of a stage, run when it is made; takes the place of `Route`, too."""

    def __init__(self, path: Path, plan: str) -> None:
        if not path.is_file():
            raise EmitError(f"{path}: there is no such file. Write the sources with plan.emit_source(folder, ...).")
        self._names = runpy.run_path(str(path))
        if self._names.get("PLAN") != plan:
            raise EmitError(f"{path} was written for another plan or model. Write it anew with plan.emit_source().")

    def bind(self, groups: StageGroups, seam: StageGroups, submodule: Callable[[str], nn.Module]) -> None:
        """Give the groups of ranks and the submodules of the model that the file names to it."""
        for value in self._names.values():
            if isinstance(value, Axes):
                value.bind(seam if value.prime else groups)
            elif isinstance(value, Here):
                value.device = groups.device
            elif isinstance(value, Submodule):
                value.bind(submodule)

    def layer(self, index: int, program: Program) -> LayerSource:
        """The code of the stage's layer `index`, whose program is this."""
        function = self._names["LAYERS"][index]
        evaluating = self._names["EVALUATING"].get(function, function)
        return LayerSource(program, function, evaluating, self._names["BATCH"])

    def run(
        self, values: dict[str, Tensor], _batch: int, run_layer: Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        """What the stage sends on, or its loss."""
        found: tuple[Tensor, ...] = self._names["forward"](lambda i, *inputs: run_layer(i, inputs), dict(values))
        return found


def stage_source(folder: Path, record: PlanRecord, number: int) -> StageSource:
    """The file of a stage of the plan. Raises EmitError where it is absent or of another plan."""
    return StageSource(stage_file(folder, number), digest(record))
