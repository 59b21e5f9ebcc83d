"""The parallel module: what a training script holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autopar.emit.groups import Axes, StageGroups
from autopar.emit.inputs import Names, check_inputs, microbatches, rows_of
from autopar.emit.layers import StageModule
from autopar.emit.loss_weights import Weights
from autopar.emit.parameters import StageParameter, finish_gradients, local, reduce_gradients, refresh
from autopar.emit.storage import Storage
from autopar.emit.torch_private import is_persistent, norms_of, scale_all
from autopar.errors import EmitError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord


@dataclass(frozen=True)
class Runtime:
    """What a rank of a stage runs.

    `publics` are the parameters as the optimizer sees them, in the model's order; `kept` those that FSDP2 keeps, with
    its own sharded tensor, whose memory the public one shares.
    """

    stage: StageModule
    groups: StageGroups
    storages: dict[str, Storage]
    publics: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    steps: tuple[StageParameter, ...]
    kept: tuple[tuple[Storage, nn.Parameter], ...]
    data_axes: Axes
    weights: Weights


class ParallelModule(nn.Module):
    """A model that runs as its plan says.

    Parameters, buffers and state_dict carry the model's own names; parameters are DTensors (plain tensors without
    torch.distributed) that hold this rank's shard. Every rank of the plan passes the rows of its `data_parallel_rank`.
    On ranks the plan leaves idle there are no parameters and `data_parallel_rank` is None.
    """

    def __init__(self, graph: OpGraph, record: PlanRecord, names: Names, data_parallel_size: int) -> None:
        super().__init__()
        self.data_parallel_size = data_parallel_size
        self._graph = graph
        self._record = record
        self._names = names
        self._steps = 0
        self._runtime: Runtime | None = None

    def install(self, runtime: Runtime, module: nn.Module) -> None:
        """Take `runtime`, and register its parameters and buffers under the names they have in `module`."""
        self._runtime = runtime
        aliases = self._graph.aliases
        for name, _ in module.named_parameters(remove_duplicate=False):
            owner, key = self._owner(name)
            owner.register_parameter(key, runtime.publics[aliases.get(name, name)])
        for name, _ in module.named_buffers(remove_duplicate=False):
            tensor = runtime.buffers.get(aliases.get(name, name))
            if tensor is not None:
                owner, key = self._owner(name)
                path, _, _ = name.rpartition(".")
                owner.register_buffer(key, tensor, persistent=is_persistent(module.get_submodule(path), key))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module in which the last part of a dotted name is registered; made if need be."""
        owner: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner, key

    @property
    def runtime(self) -> Runtime | None:
        """What this rank runs; None on an idle rank."""
        return self._runtime

    # --- what a script calls ------------------------------------------------------------------------------------

    @property
    def data_parallel_rank(self) -> int | None:
        """Which part of the global batch this rank is to be given; None on an idle rank."""
        return None if self._runtime is None else self._runtime.groups.index(self._runtime.data_axes)

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
        """The loss of the global batch taken at once (one microbatch); `backward()` leaves synchronised gradients."""
        values = self._values(args, inputs)
        self._begin()
        return self._run(values, on_backward=self._synchronise if torch.is_grad_enabled() else None)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most `max_norm`; returns the norm before."""
        runtime = self._active()
        norm = self._grad_norm(runtime, norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [local(p.grad) for p in runtime.publics.values() if p.grad is not None]
        if gradients:
            scale_all(gradients, scale)
        return norm

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch dropout on or off."""
        super().train(mode)
        if self._runtime is not None:
            self._runtime.stage.train(mode)
        return self

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise EmitError("a ParallelModule can't be moved or converted; give `device` and `dtype` when it is made.")

    # --- how ----------------------------------------------------------------------------------------------------

    def _active(self) -> Runtime:
        if self._runtime is None:
            raise EmitError(
                "this rank is idle under the plan: it may only call train_step() and eval_step(), without inputs. "
                "Check `pm.data_parallel_rank is None`."
            )
        return self._runtime

    def _values(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Tensor]:
        return check_inputs(self._graph, self._names.of(args, inputs), self._active().groups.device)

    def _step(self, args: tuple[Any, ...], inputs: dict[str, Any], train: bool) -> Tensor:
        if self._runtime is None:
            return self._announce(torch.zeros((), dtype=self._loss_dtype))
        runtime = self._runtime
        parts = microbatches(self._graph, self._values(args, inputs), self._record.num_microbatches)
        weights = runtime.weights(parts, rows_of(self._graph, parts[0]) * self.data_parallel_size)
        self._begin()
        total = torch.zeros((), device=runtime.groups.device, dtype=self._loss_dtype)
        for k, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            if not weight:
                continue  # nothing in it counts, and its own mean would be 0/0
            loss = self._run(part, k, len(parts)) * weight
            if train:
                loss.backward()
            total += loss.detach()
        if train:
            self._synchronise()
        return self._announce(total)

    @property
    def _loss_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._graph.values[str(self._graph.loss)].dtype)
        return dtype

    def _begin(self) -> None:
        """Let everything that was gathered or cast be made anew from the stored values."""
        runtime = self._active()
        self._steps += 1
        refresh(runtime.steps, runtime.groups)
        for module in runtime.stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _run(
        self, values: dict[str, Tensor], k: int = 0, parts: int = 1, on_backward: Callable[[], None] | None = None
    ) -> Tensor:
        """The loss of microbatch `k` of `parts`."""
        runtime, rows = self._active(), rows_of(self._graph, values)
        draw = self._draw(rows, k, parts) if self.training and runtime.stage.draws else None
        loss: Tensor = runtime.stage(values, rows * self.data_parallel_size, draw, on_backward)
        return loss

    def _draw(self, rows: int, k: int, parts: int) -> Tensor:
        """Seed of this step, then the number in the global batch of each sample of a global microbatch."""
        seed = (self._record.request.seed * 1_000_003 + self._steps << 16) % (1 << 62)
        first = torch.arange(self.data_parallel_size).unsqueeze(1) * (rows * parts) + k * rows
        samples = (first + torch.arange(rows)).flatten()
        return torch.cat([torch.tensor([seed]), samples]).to(self._active().groups.device)

    def _announce(self, loss: Tensor) -> Tensor:
        """The loss on idle ranks, too."""
        stage = self._record.stages[0]
        if len(stage.devices) < self._record.request.devices:
            dist.broadcast(loss, stage.devices[0])
        return loss

    @torch.no_grad()
    def _synchronise(self) -> None:
        """Bring the gradients of all finished backward passes to `.grad`."""
        runtime = self._active()
        gradients = reduce_gradients(runtime.steps, runtime.groups)
        for storage, parameter in runtime.kept:
            if parameter.grad is not None:
                gradients.append((storage, local(parameter.grad), storage.remaining_axes))
                parameter.grad = None
        finish_gradients(gradients, runtime.publics, runtime.groups)

    @torch.no_grad()
    def _grad_norm(self, runtime: Runtime, norm_type: float) -> Tensor:
        """Norm over the whole model: each rank adds its shards, a shard held by n ranks with 1/n of its weight."""
        groups = runtime.groups
        found = [(runtime.storages[n], local(p.grad)) for n, p in runtime.publics.items() if p.grad is not None]
        everywhere = torch.zeros((), device=groups.device, dtype=torch.float64 if _wide(found) else torch.float32)
        if not found:
            return everywhere
        norms = torch.stack([n.to(everywhere.dtype) for n in norms_of([g for _, g in found], norm_type)])
        if norm_type == float("inf"):
            everywhere = norms.max()
        else:
            copies = torch.tensor([groups.ways(s.whole_axes(groups)) for s, _ in found], device=norms.device)
            everywhere = (norms**norm_type / copies).sum()
        if groups.ways(groups.all_axes) > 1:
            op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
            dist.all_reduce(everywhere, op=op, group=groups.group(groups.all_axes))
        return everywhere if norm_type == float("inf") else everywhere ** (1 / norm_type)


def _wide(found: list[tuple[Storage, Tensor]]) -> bool:
    return any(g.dtype == torch.float64 for _, g in found)
