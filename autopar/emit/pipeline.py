"""Stages of a pipeline on this rank, run by `torch.distributed.pipelining`'s schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.cost.orders import Shape
from autopar.cost.schedule import keeps_sent
from autopar.emit.crossing import Port, placeholders
from autopar.emit.layers import LayerModule, StageModule
from autopar.emit.loss_scale import LossScale
from autopar.emit.pipeline_stage import LeanStage, leave_gathering_to_hooks
from autopar.emit.route import Route
from autopar.emit.sends import Sends
from autopar.emit.source.read import StageSource
from autopar.emit.split import WeightGradients
from autopar.emit.teams import Teams
from autopar.graph import OpGraph, TensorSpec
from autopar.plan import PlanRecord
from autopar.shard.cuts import Spot

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""Schedules of one stage on each device, by the plan's name for them."""

_MULTI: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Those of several, or of one whose backward pass is split."""


@dataclass
class Feed:
    """What the stages of this rank run a step on: its rows of each microbatch, their weight in the loss, masks' seeds.

    `batch` is the number of samples of a global microbatch.
    """

    parts: Sequence[dict[str, Tensor]] = ()
    weights: Sequence[float] = ()
    draws: Sequence[Tensor | None] = ()
    batch: int = 0

    def take(self, other: Feed) -> None:
        """Hold what `other` does, each microbatch of no weight replaced by one that has some.

        A schedule can't leave one out, and its own mean would be 0/0; another's is multiplied by 0.
        """
        some = next(k for k, weight in enumerate(other.weights) if weight)
        self.parts = [other.parts[k if weight else some] for k, weight in enumerate(other.weights)]
        self.weights, self.draws, self.batch = other.weights, other.draws, other.batch

    def drop(self) -> None:
        """Let the rows go."""
        self.parts = self.draws = ()


class PipelinedStage(StageModule):
    """One stage of a pipeline: from what it receives and its rank's rows of a microbatch to what it sends on.

    Microbatches come in order; `begin` starts at the first again. `late` takes gradients of weights where the schedule
    makes them apart.
    """

    def __init__(
        self,
        layers: list[LayerModule],
        route: Route | StageSource,
        graph: OpGraph,
        port: Port,
        feed: Feed,
        spot: Spot,
        late: WeightGradients | None = None,
    ) -> None:
        super().__init__(layers, route)
        self.port, self.spot, self.late = port, spot, late
        self._feed = feed
        self._flows = {n: graph.values[n].requires_grad for n in port.sends}
        self._next = 0

    def begin(self) -> None:
        """Start a step."""
        self._next = 0

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """What is sent on (the loss by the last stage), of the next microbatch; all tensors are local."""
        feed, k = self._feed, self._next
        self._next += 1
        values = feed.parts[k] | dict(zip(self.port.receives, received, strict=True))
        draw, batch = feed.draws[k], feed.batch
        made = self._route.run(values, batch, lambda i, inputs: self.layers[i](batch, draw, *inputs))
        return tuple(self._sent(name, tensor) for name, tensor in zip(self.port.sends, made, strict=True))

    def _sent(self, name: str, tensor: Tensor) -> Tensor:
        # What is only passed on is a buffer of the schedule's own: hooks must not be left on it.
        tensor = tensor.view_as(tensor) if name in self.port.receives else tensor
        return (tensor if self._flows[name] else tensor.detach()).contiguous()


class Pipeline:
    """The stages of this rank, run by the plan's schedule on what `feed` holds."""

    def __init__(self, graph: OpGraph, record: PlanRecord, teams: Teams, feed: Feed, device: torch.device) -> None:
        self.teams = teams
        self._graph, self._record, self._feed, self._device = graph, record, feed, device
        self._stages: list[PipelinedStage] = []
        self._scale: LossScale | None = None
        self._made: dict[tuple[int, bool], Any] = {}
        self._sends: Sends | None = None

    def take(self, stages: Sequence[PipelinedStage]) -> None:
        """Run these, this rank's stages in order."""
        self._stages = list(stages)
        record, team = self._record, self.teams.team
        shape = Shape(record.schedule, record.pp_degree, len(stages), record.num_microbatches)
        self._sends = Sends(shape, team) if team is not None and keeps_sent(shape) else None

    def run(self, feed: Feed, train: bool, scale: LossScale | None = None) -> Tensor:
        """One step on `feed`; returns this rank's sum of the weighted losses (0 but on the last stage)."""
        self._feed.take(feed)
        self._scale = scale
        for stage in self._stages:
            stage.begin()
        schedule = self._schedule(feed.batch, train)
        losses: list[Tensor] = []
        numbers = torch.arange(self._record.num_microbatches)
        try:
            (schedule.step if train else schedule.eval)(target=numbers, losses=losses, return_outputs=False)
            if self._sends is not None:
                self._sends.end()
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch wraps what a stage raises
        finally:
            self._feed.drop()
            if self._sends is not None:
                self._sends.forget()
        total = torch.zeros((), device=self._device, dtype=getattr(torch, self._loss.dtype))
        for loss in losses:
            total += loss.detach()
        return total

    @property
    def _loss(self) -> TensorSpec:
        return self._graph.values[str(self._graph.loss)]

    def _schedule(self, batch: int, train: bool) -> Any:
        """The schedule for global microbatches of `batch` samples; its buffers fit no other."""
        if (batch, train) not in self._made:
            self._made[batch, train] = self._scheduled([self._lean(stage, batch) for stage in self._stages])
        return self._made[batch, train]

    def _lean(self, stage: PipelinedStage, batch: int) -> LeanStage:
        port = stage.port
        received = tuple(placeholders(self._graph, port.receives, stage.spot, batch))
        sent = tuple(placeholders(self._graph, port.sends, stage.spot, batch))
        count = len(self._record.stages)
        return LeanStage(
            stage, stage.late, port.number, count, self._device, received, sent, self.teams.line, self._sends
        )

    def _scheduled(self, stages: list[LeanStage]) -> Any:
        # Losses are weighted already: gradients are sums over microbatches.
        count, options = self._record.num_microbatches, {"loss_fn": self._weighted, "scale_grads": False}
        if self._record.schedule in _SINGLE:
            return _SINGLE[self._record.schedule](stages[0], count, **options)
        schedule = _MULTI[self._record.schedule](stages, count, **options)
        leave_gathering_to_hooks(schedule)
        return schedule

    def _weighted(self, loss: Tensor | tuple[Tensor, ...], number: Tensor) -> Tensor:
        loss = loss if isinstance(loss, Tensor) else loss[0]
        loss = loss if self._scale is None else self._scale.applied(loss)
        return loss * self._feed.weights[int(number)]
