"""Proof that a plan computes what the model does on one device: loss, every gradient, parameters after some steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.emit.build import emit, emit_alone
from autopar.emit.example import random_batch
from autopar.emit.materialize import values
from autopar.emit.on_shards import on_shards
from autopar.emit.rows import slice_rows
from autopar.errors import EmitError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from autopar.trace.inputs import BoundInputs, ExampleInputs, bind
from autopar.trace.loss import Root
from autopar.trace.randomness import draws
from autopar.trace.torch_private import named_tensors, owned_tensors, put_tensor

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The largest relative difference found, and the tensor it was found in ('' = none compared)."""

    value: float
    where: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """How far a plan is from the model on one device.

    Differences are relative to the larger of the tensor's own largest value and 1e-6 of the largest gradient of the
    model (some gradients are zero in exact arithmetic). `gradient` is of the first step, `parameter` after all `steps`
    of AdamW, buffers (running statistics) among the parameters. `reference` says what was compared with.
    """

    loss: float
    reference_loss: float
    loss_difference: float
    gradient: Difference
    parameter: Difference
    missing_gradients: tuple[str, ...]
    steps: int
    reference: str

    @property
    def largest(self) -> float:
        """The largest of all differences; infinite where gradients are missing."""
        if self.missing_gradients:
            return float("inf")
        return _worst([Difference(self.loss_difference), self.gradient, self.parameter]).value

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return asdict(self) | {"largest": self.largest}

    def __str__(self) -> str:
        missing = ", ".join(self.missing_gradients[:8]) or "none"
        return "\n".join([
            f"compared with {self.reference}; largest relative differences:",
            f"loss               {self.loss_difference:.1e}   ({self.loss:.9g} against {self.reference_loss:.9g})",
            f"gradients          {self.gradient.value:.1e}   {self.gradient.where}",
            f"parameters         {self.parameter.value:.1e}   {self.parameter.where} (after {self.steps} AdamW steps)",
            f"missing gradients  {missing}",
        ])  # fmt: skip


def verify(
    plan: PlanRecord,
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    steps: int = 3,
    device: torch.device | str = "cpu",
    loss_fn: Callable[..., Tensor] | None = None,
    graph: OpGraph | None = None,
    seed: int = 0,
) -> VerifyReport:
    """Train `model` for some steps under `plan` and on one device, and compare; collective over the job.

    The batch is made of random values of the kind of `example_inputs`. Both sides keep parameters in the plan's
    parameter dtype; the reference computes in it, too, so under bf16 the difference shows what bf16 costs. Where the
    model drops out, the reference is autopar's own plan for one device, which draws the same masks. The plan's first
    rank holds the reference: for models that fit on one device. The same report is returned on every rank, and an
    error of the reference raised on every rank. `graph` spares tracing the model again.
    """
    device = torch.device(device)
    graph = graph or trace(model, example_inputs, compute_dtype=plan.request.policy.compute, loss_fn=loss_fn)
    inputs = bind(model, example_inputs)
    batch = random_batch(graph, inputs.tensors, plan.request.global_batch, seed, device)
    pm = emit(plan, graph, model, device=device)
    args, kwargs = _rows(graph, inputs, batch, pm.data_parallel_rows())
    ours = _train(pm, lambda: pm.train_step(*args, **kwargs), steps)
    trainings, drift = _gathered(plan, ours), _drift(plan, ours)

    def compared() -> VerifyReport:
        about, reference, step = _reference(plan, graph, model, inputs, batch, loss_fn, device)
        return _compare(trainings, _train(reference, step, steps), about, drift)

    return _on_first(plan, compared, device)


def _on_first(plan: PlanRecord, work: Callable[[], VerifyReport], device: torch.device) -> VerifyReport:
    """What `work` gives on the plan's first rank, on every rank; so is an error, which else all would wait for."""
    if not dist.is_initialized():
        return work()
    first = plan.stages[0].devices[0]
    told: list[VerifyReport | EmitError | None] = [None]
    if dist.get_rank() == first:
        try:
            told[0] = work()
        except Exception as error:
            told[0] = EmitError(f"the model on one device, on rank {first}: {type(error).__name__}: {error}")
    dist.broadcast_object_list(told, first, device=device)
    if isinstance(told[0], EmitError):
        raise told[0]
    return cast(VerifyReport, told[0])


def _rows(
    graph: OpGraph, inputs: BoundInputs, batch: list[Tensor], rows: range | None
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for these rows of the batch; none on an idle rank."""
    if rows is None:
        return [], {}
    own = slice_rows(dict(zip(graph.inputs, batch, strict=True)), graph, rows)
    args, kwargs, extra = inputs.call(list(own.values()))
    return args, kwargs | extra


@dataclass(frozen=True)
class _Training:
    """What came out of some steps: their losses, the gradients of the first, parameters and buffers after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]

    def on_cpu(self) -> _Training:
        """The same in memory that any rank can read."""
        moved = ({n: t.detach().cpu() for n, t in named.items()} for named in (self.gradients, self.parameters))
        return _Training(self.losses, *moved)


def _train(module: nn.Module, step: Callable[[], Tensor], steps: int) -> _Training:
    """AdamW steps, on shards; `step` leaves gradients and returns the loss. Whole tensors are gathered: collective."""
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    optimizer = on_shards(torch.optim.AdamW(named.values(), lr=LEARNING_RATE)) if named else None
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for i in range(steps):
        losses.append(float(step().detach()))
        if i == 0:
            gradients = {n: _whole(p.grad).clone() for n, p in named.items() if p.grad is not None}
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return _Training(losses, gradients, {n: _whole(p.detach()) for n, p in named.items()} | buffers)


def _gathered(plan: PlanRecord, ours: _Training) -> list[_Training]:
    """What came out on the first rank of each group of devices, given to the first rank of all.

    Each has the parameters of its own stages; those that several have are compared on each.
    """
    firsts = [stage.devices[0] for stage in plan.stages[: plan.pp_degree]]
    if len(firsts) == 1:
        return [ours]
    rank = dist.get_rank()
    found: list[_Training | None] | None = [None] * dist.get_world_size() if rank == firsts[0] else None
    dist.gather_object(ours.on_cpu() if rank in firsts else None, found, firsts[0])
    return [one for one in found or () if one is not None]


def _drift(plan: PlanRecord, ours: _Training) -> tuple[Difference, Difference]:
    """On the plan's first rank: how far ranks of one group differ in gradients and in parameters that all hold.

    By the sums of their elements, which those of equal tensors are equal in.
    """
    groups = [stage.devices for stage in plan.stages[: plan.pp_degree]]
    if max(map(len, groups)) == 1:
        return Difference(0.0), Difference(0.0)
    first, rank = groups[0][0], dist.get_rank()
    every: list[Any] = [None] * dist.get_world_size()
    own = [{n: _sums(t) for n, t in named.items()} for named in (ours.gradients, ours.parameters)]
    dist.gather_object(own, every if rank == first else None, first)
    pairs = [(g[0], member) for g in groups for member in g[1:]] if rank == first else []
    floor = 1e-6 * max((size for g, _ in pairs for _, size, _ in every[g][0].values()), default=0.0)
    found = [[Difference(0.0)], [Difference(0.0)]]
    for leader, member in pairs:
        for kind, theirs, its in zip(found, every[leader], every[member], strict=True):
            for name, (total, size, odd) in theirs.items():
                apart = abs(its[name][0] - total) if its[name][2] == odd else inf
                if apart:
                    kind.append(Difference(apart / (max(size, floor) or 1.0), f"{name} on rank {member}"))
    return _worst(found[0]), _worst(found[1])


def _sums(tensor: Tensor) -> tuple[float, float, tuple[int, ...]]:
    """The sum of a tensor's finite elements, their largest, and how many are nan, inf and -inf (as in masks)."""
    wide = tensor.detach().double()
    odd = tuple(int(of.sum()) for of in (wide.isnan(), wide == inf, wide == -inf))
    finite = _finite(wide)
    return float(finite.sum()), _size(finite), odd


def _finite(wide: Tensor) -> Tensor:
    """A tensor with 0 where it is nan or infinite."""
    return wide.nan_to_num(0.0, 0.0, 0.0)


def _size(tensor: Tensor) -> float:
    """The largest element; 0 where there is none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _reference(
    plan: PlanRecord,
    graph: OpGraph,
    model: nn.Module,
    inputs: BoundInputs,
    batch: list[Tensor],
    loss_fn: Callable[..., Tensor] | None,
    device: torch.device,
) -> tuple[str, nn.Module, Callable[[], Tensor]]:
    """What to compare with: a description, the module, and what does forward and backward."""
    if model.training and any(draws(op) for c in graph.classes for op in c.ops):
        alone = emit_alone(plan, graph, model, device=device)
        args, kwargs = _rows(graph, inputs, batch, alone.data_parallel_rows())
        return (
            "autopar's own plan for one device, as the model drops out",
            alone,
            lambda: alone.train_step(*args, **kwargs),
        )
    dtype = plan.request.policy.parameters
    reference = _copy(model, dtype, device, plan.request.seed)
    wide = [t.to(getattr(torch, dtype)) if t.is_floating_point() else t for t in batch]
    root = Root(reference, inputs, loss_fn)

    def step() -> Tensor:
        results = root(*wide)
        loss: Tensor = results[root.outcome.loss_at or 0]
        loss.backward()
        return loss

    return f"the model on one device in {dtype}", reference, step


def _copy(model: nn.Module, dtype: str, device: torch.device, seed: int) -> nn.Module:
    """A real copy of the model with the values that `emit` gives it, tied ones tied; parameters in `dtype`."""
    named = dict(named_tensors(model))
    real: dict[int, Tensor] = {}
    for name, whole in values(model, device, seed):
        parameter = isinstance(named[name], nn.Parameter)
        wide = getattr(torch, dtype) if parameter and whole.is_floating_point() else whole.dtype
        made = whole.to(device, wide, copy=True)
        real[id(named[name])] = nn.Parameter(made, named[name].requires_grad) if parameter else made
    twin = copy.deepcopy(model)
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        for key, tensor in owned_tensors(ours).items():
            put_tensor(theirs, key, real[id(tensor)])
    return twin


def _compare(
    ours: list[_Training],
    theirs: _Training,
    about: str,
    drift: tuple[Difference, Difference] = (Difference(0.0), Difference(0.0)),
) -> VerifyReport:
    largest_gradient = max((float(g.abs().max()) for g in theirs.gradients.values() if g.numel()), default=0.0)
    floor = 1e-6 * largest_gradient
    pairs = [pair for one in ours for pair in zip(one.losses, theirs.losses, strict=True)]
    losses = [abs(a - b) / max(abs(b), floor) for a, b in pairs]
    return VerifyReport(
        ours[0].losses[0], theirs.losses[0], _worst([Difference(loss) for loss in losses]).value,
        _worst([drift[0], *(_largest(one.gradients, theirs.gradients, floor) for one in ours)]),
        _worst([drift[1], *(_largest(one.parameters, theirs.parameters, floor) for one in ours)]),
        tuple(n for n in theirs.gradients if not any(n in one.gradients for one in ours)), len(theirs.losses), about,
    )  # fmt: skip


def _worst(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda d: float("inf") if math.isnan(d.value) else d.value)  # nan counts as largest


def _largest(ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float) -> Difference:
    found = [Difference(0.0)]
    for name, tensor in theirs.items():
        if name in ours and not torch.equal(mine := ours[name].to(tensor.device, tensor.dtype), tensor):
            scale = max(_size(_finite(tensor.double())), floor)
            difference = _size((mine.double() - tensor.double()).where(mine != tensor, 0.0))  # inf - inf is nan
            relative = difference / scale if scale else difference
            found.append(Difference(relative, name))
    return _worst(found)
