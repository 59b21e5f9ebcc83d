"""The parallel module: what a training script holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.emit.alarm import Alarm
from autopar.emit.compiled import compile_layers
from autopar.emit.gradients import Gradients
from autopar.emit.inputs import Names, check_inputs, microbatches
from autopar.emit.loss_scale import LossScale
from autopar.emit.naming import register
from autopar.emit.pipeline import Feed, Pipeline
from autopar.emit.rows import Rows
from autopar.emit.runtime import Runtime
from autopar.errors import EmitError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord


class Made(NamedTuple):
    """What a module was made of beside its plan: the traced model, the kind of loss, the device of this rank."""

    graph: OpGraph
    loss: str
    device: torch.device


class ParallelModule(nn.Module):
    """A model that runs as its plan says.

    Parameters, buffers and state_dict carry the model's own names; parameters are DTensors (plain tensors without
    torch.distributed) that hold this rank's shard. Every rank of the plan passes the rows of its `data_parallel_rank`.
    `steps` counts steps in training mode; dropout's masks follow from it: set it when you resume a run.
    On ranks the plan leaves idle there are no parameters and `data_parallel_rank` is None. Under a pipeline a rank has
    the parameters and buffers of its own stages only; tied ones are on all ranks whose stages use them, and kept equal.
    """

    def __init__(
        self,
        graph: OpGraph,
        record: PlanRecord,
        names: Names,
        rows: Rows,
        pipeline: Pipeline | None,
        alarm: Alarm,
        loss: str,
    ) -> None:
        super().__init__()
        self.data_parallel_size = rows.ways
        self._graph = graph
        self._loss_kind = loss
        self._scale = LossScale() if record.request.policy.compute == "float16" else None
        self._record = record
        self._names = names
        self._rows = rows
        self._pipeline = pipeline
        self._alarm = alarm
        self.steps = 0
        self._compiled: dict[str, Any] | None = None
        self._runtimes: tuple[Runtime, ...] = ()
        self._gradients: Gradients | None = None

    @property
    def record(self) -> PlanRecord:
        """The plan that the module runs; `autopar.Plan(pm.record)` explains and saves it."""
        return self._record

    @property
    def made_of(self) -> Made:
        """What another module of the same model is made of."""
        return Made(self._graph, self._loss_kind, self._device)

    @property
    def loss_scale(self) -> LossScale | None:
        """Of a plan that computes in float16: what gradients are multiplied by while they are float16."""
        return self._scale if self._runtimes else None

    def let_go(self) -> None:
        """Drop parameters, buffers and all that runs: what is left only waits to `become` another."""
        self._runtimes, self._pipeline, self._gradients = (), None, None
        for held in (self._parameters, self._buffers, self._modules):
            held.clear()

    def become(self, other: ParallelModule) -> None:
        """Be `other` from now on, under this object's name and with its hooks: its plan, parameters and rows."""
        training = self.training
        self.__dict__.update({name: value for name, value in other.__dict__.items() if "_hooks" not in name})
        self.train(training)

    def install(self, runtimes: tuple[Runtime, ...], module: nn.Module) -> None:
        """Take `runtimes`, and register their parameters and buffers under the names they have in `module`."""
        self._runtimes = runtimes
        teams = None if self._pipeline is None else self._pipeline.teams
        wide = self._record.request.policy.parameters == "float64"
        self._gradients = Gradients(runtimes, self._device, self._everyone(), teams, self._scale, wide)
        buffers = {n: b for runtime in runtimes for n, b in runtime.buffers.items()}
        register(self, module, self._gradients.parameters, buffers, self._graph.aliases)

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """What this rank runs: each of its stages; none on an idle rank."""
        return self._runtimes

    # --- what a script calls ------------------------------------------------------------------------------------

    @property
    def data_parallel_rank(self) -> int | None:
        """Which part of the global batch this rank is to be given; None on an idle rank."""
        return self._rows.groups.index(self._rows.data_axes) if self._runtimes else None

    def data_parallel_rows(self, global_batch: int | None = None) -> range | None:
        """The rows of a global batch (by default of the plan's size) that this rank is to be given; None if idle."""
        count = self._record.num_microbatches
        return self._rows.part(global_batch or self._record.request.global_batch, count) if self._runtimes else None

    def train_step(self, *args: Any, **inputs: Any) -> Tensor:
        """Forward and backward over all microbatches; adds the synchronised gradients to `.grad`.

        Inputs are this rank's rows of the global batch (none on an idle rank). Returns the loss of the whole global
        batch on every rank. Raises EmitError where the inputs don't fit, or the model has no loss.
        """
        return self._step(args, inputs, train=True)

    @torch.no_grad()
    def eval_step(self, *args: Any, **inputs: Any) -> Tensor:
        """The loss of the whole global batch, without gradients and dropout."""
        was_training = self.training
        self.train(False)
        try:
            return self._step(args, inputs, train=False)
        finally:
            self.train(was_training)

    def forward(self, *args: Any, **inputs: Any) -> Tensor:
        """The loss of the global batch taken at once (one microbatch); `backward()` leaves synchronised gradients.

        Raises EmitError under a pipeline.
        """
        if self._pipeline is not None:
            raise EmitError(
                "a pipeline runs forward and backward of several microbatches at once, so there is no loss to call "
                "backward() on. Call train_step(**batch) instead of the module, or plan with pp=1."
            )
        values, batch = self._rows.deal(self._graph, self._values(args, inputs), 1)
        (weight,) = self._rows.weights([values], batch)
        self._begin()
        loss = self._run(values, batch, self._draw(batch, 0, 1), self._synchronise if torch.is_grad_enabled() else None)
        return loss if weight == 1.0 else loss * weight

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

        Idle ranks, which hold none, may call it or not, and get 0.
        """
        if self._gradients is None:
            return torch.zeros((), device=self._device)
        return self._gradients.clip(max_norm, norm_type)

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch dropout on or off."""
        super().train(mode)
        for runtime in self._runtimes:
            runtime.stage.train(mode)
        return self

    def compile(self, **options: Any) -> None:
        """Run every layer by `torch.compile` from now on, with its `options`, under any plan."""
        self._compiled = options
        compile_layers((runtime.stage for runtime in self._runtimes), options)

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise EmitError("a ParallelModule can't be moved or converted; give `device` and `dtype` when it is made.")

    # --- how ----------------------------------------------------------------------------------------------------

    def _active(self) -> tuple[Runtime, ...]:
        if not self._runtimes:
            raise EmitError(
                "this rank is idle under the plan: it may only call train_step() and eval_step(), without inputs, and "
                "clip_grad_norm_(). "
                "Check `pm.data_parallel_rank is None`."
            )
        return self._runtimes

    @property
    def _device(self) -> torch.device:
        return self._rows.groups.device

    def _values(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Tensor]:
        self._active()
        return check_inputs(self._graph, self._names.of(args, inputs), self._device)

    def _step(self, args: tuple[Any, ...], inputs: dict[str, Any], train: bool) -> Tensor:
        with self._alarm.call(f"step {self.steps + self.training}"):
            total = torch.zeros((), device=self._device, dtype=self._loss_dtype)
            if self._runtimes:
                feed = self._feed(args, inputs)
                self._begin()
                feed.draws = [self._draw(feed.batch, k, len(feed.parts)) for k in range(len(feed.parts))]
                if self._pipeline is None:
                    total += self._accumulated(feed, train)
                else:
                    total += self._pipeline.run(feed, train, self._scale)
                if train:
                    self._synchronise()
            else:
                self.steps += self.training  # counted where nothing begins, too
            return self._announce(total)

    def _accumulated(self, feed: Feed, train: bool) -> Tensor:
        """The loss of the microbatches, run one after the other."""
        total = torch.zeros((), device=self._device, dtype=self._loss_dtype)
        for part, weight, draw in zip(feed.parts, feed.weights, feed.draws, strict=True):
            if not weight:
                continue  # nothing in it counts, and its own mean would be 0/0
            loss = self._run(part, feed.batch, draw) * weight
            if train:
                loss.backward()
            total += loss.detach()
        return total

    def _feed(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> Feed:
        """This rank's rows as microbatches, with their weights in the loss."""
        count = self._record.num_microbatches
        values, batch = self._rows.deal(self._graph, self._values(args, inputs), count)
        self._rows.require_one_each(batch)
        parts = microbatches(self._graph, values, count)
        return Feed(parts, self._rows.weights(parts, batch), batch=batch)

    @property
    def _loss_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._graph.values[str(self._graph.loss)].dtype)
        return dtype

    def _begin(self) -> None:
        """Let everything that was gathered or cast be made anew from the stored values."""
        self.steps += self.training
        for runtime in self._active():
            runtime.begin()

    def _run(
        self, values: dict[str, Tensor], batch: int, draw: Tensor | None, on_backward: Callable[[], None] | None = None
    ) -> Tensor:
        """The loss of a microbatch of `batch` samples in all."""
        (runtime,) = self._active()
        loss: Tensor = runtime.stage(values, batch, draw, on_backward)
        return loss if self._scale is None else self._scale.applied(loss)

    def _draw(self, batch: int, k: int, parts: int) -> Tensor | None:
        """Seed of this step, then the number in the global batch of each sample of a global microbatch.

        None where nothing is drawn.
        """
        if not (self.training and any(runtime.stage.draws for runtime in self._runtimes)):
            return None
        seed = (self._record.request.seed * 1_000_003 + self.steps << 16) % (1 << 62)
        return torch.cat([torch.tensor([seed]), self._rows.samples(batch, k, parts)]).to(self._device)

    def _announce(self, loss: Tensor) -> Tensor:
        """The loss on ranks that have not computed it, too."""
        stages = self._record.stages
        if len(stages) > 1 or len(stages[0].devices) < self._record.request.devices:
            dist.broadcast(loss, stages[-1].devices[0])
        return loss

    def _synchronise(self) -> None:
        """Bring the gradients of all finished backward passes to `.grad`."""
        if self._gradients is not None:
            self._gradients.bring_home()

    def _everyone(self) -> dist.ProcessGroup | None:
        """The group of all ranks that hold a part of the model; None where it is this one alone."""
        if self._pipeline is not None:
            return self._pipeline.teams.everyone
        groups = self._rows.groups
        return groups.group(groups.all_axes) if groups.ways(groups.all_axes) > 1 else None
