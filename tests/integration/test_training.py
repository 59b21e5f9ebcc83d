"""Trainings as people run them, against one device: every optimizer, schedules, clipping, frozen and added weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.emit.build import emit
from autopar.emit.example import random_batch
from autopar.emit.on_shards import WHOLE, on_shards, on_wholes
from autopar.emit.rows import slice_rows
from autopar.errors import ConfigError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.pool import Pool

BATCH, STEPS = 16, 3
Make = Callable[[Any], torch.optim.Optimizer]

HOW: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
KINDS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.AdamW: {"amsgrad": True}, torch.optim.Adam: {"weight_decay": 0.1}, torch.optim.Adagrad: {},
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True}, torch.optim.RMSprop: {}, torch.optim.Adadelta: {},
    torch.optim.NAdam: {}, torch.optim.RAdam: {}, torch.optim.Adamax: {}, torch.optim.ASGD: {},
}  # fmt: skip
"""All but Rprop, whose steps of a fixed length follow the signs of gradients that are zero but for rounding."""
FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD)


def maker(kind: type[torch.optim.Optimizer], how: str) -> Make:
    return lambda parameters: kind(parameters, lr=0.01, **HOW[how] | KINDS[kind])  # type: ignore[call-arg]


OPTIMIZERS = {
    f"{kind.__name__} {how}": maker(kind, how) for kind in KINDS for how in HOW if how != "fused" or kind in FUSED
}
WHOLES = ("Adafactor", "Muon")
OPTIMIZERS |= {
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.dim() == 2], lr=0.01),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.01),
}
FEW = ("SGD fused", "Adagrad fused", "ASGD foreach")
"""Some that DTensor has no rules for."""


class Added(nn.Module):
    """A linear map that is frozen, with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 2 * self.up(self.down(x))
        return result


@cache
def tuned() -> nn.Module:
    """A frozen GPT with products of low rank at its queries and values."""
    model = copy.deepcopy(example("deep gpt")[0]).requires_grad_(False)
    torch.manual_seed(4)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "v_proj")):
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, Added(module).double())
    return model


def difference(plan: PlanRecord, graph: OpGraph, model_of: Callable[[], nn.Module], make: Make) -> float:
    """The largest of any parameter after some steps with clipping and a schedule, from one device's."""
    inputs = example("deep gpt")[1]
    examples = [inputs[n] for n in graph.inputs]
    batch = dict(zip(graph.inputs, random_batch(graph, examples, BATCH, 1, torch.device("cpu")), strict=True))
    alone = copy.deepcopy(model_of())
    pm = emit(plan, graph, model_of(), device="cpu")
    rows = slice_rows(batch, graph, pm.data_parallel_rows() or range(0))
    sides: list[tuple[nn.Module, Callable[[], Any], Callable[[float], Tensor]]] = [
        (pm, lambda: pm.train_step(**rows), pm.clip_grad_norm_),
        (alone, lambda: alone(**batch)["loss"].backward(), lambda m: nn.utils.clip_grad_norm_(alone.parameters(), m)),
    ]
    for module, backward, clip in sides:
        optimizer = make([p for p in module.parameters() if p.requires_grad])
        if module is pm:
            (on_wholes if isinstance(optimizer, WHOLE) else on_shards)(optimizer)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            backward()
            clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    wanted = dict(alone.named_parameters())
    pairs = ((whole(p), wanted[n].detach()) for n, p in pm.named_parameters())
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor.detach(), "full_tensor", None)
    return tensor.detach() if gather is None else gather()


def gpt() -> nn.Module:
    return example("deep gpt")[0]


def largest(plan: PlanRecord, graph: OpGraph, names: tuple[str, ...]) -> dict[str, float]:
    return {name: difference(plan, graph, gpt, OPTIMIZERS[name]) for name in names}


def check(pool: Pool, names: tuple[str, ...]) -> None:
    graph = traced("deep gpt")
    plans = one_stage(graph, "dp=2,tp=2,sp=1,zero=1", 4, BATCH), staged(graph, ("dp=2",) * 2, (3, 3), "1f1b", 4, 2)
    for plan in plans:
        for found in pool.run(4, largest, plan, graph, names, timeout_s=300):
            assert {n: d for n, d in found.items() if d > 1e-9} == {}


def test_optimizers_on_shards(pool: Pool) -> None:
    """Fused and foreach forms that DTensor has no rules for train as on one device."""
    check(pool, FEW)


@pytest.mark.slow
def test_every_optimizer_on_shards(pool: Pool) -> None:
    """All of torch.optim that treat elements alike, in every form."""
    check(pool, tuple(n for n in OPTIMIZERS if n not in (*FEW, *WHOLES)))


def added(plan: PlanRecord, graph: OpGraph) -> float:
    return difference(plan, graph, tuned, lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True))


def test_frozen_weights_with_trained_ones_beside_them(pool: Pool) -> None:
    """Only products of low rank are trained: under ZeRO 3 with recomputation, and in a pipeline."""
    graph = trace(tuned(), example("deep gpt")[1], compute_dtype="float64")
    count = len(graph.layers)
    plans = (
        one_stage(graph, "dp=4,zero=3,recompute=full", 4, BATCH),
        staged(graph, ("tp=2",) * 2, (2, count - 2), "1f1b", 4, 2),
    )
    for plan in plans:
        assert max(pool.run(4, added, plan, graph)) < 1e-12


def test_what_needs_whole_matrices(pool: Pool) -> None:
    """Adafactor's rows and columns, and Muon's products, are those of one device."""
    check(pool, WHOLES)


def test_what_needs_whole_matrices_is_refused() -> None:
    """Adafactor's rows and columns are no matter of single elements, nor LBFGS's products of single parameters."""
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match="Adafactor computes with whole"):
        on_shards(torch.optim.Adafactor([weight]))
    with pytest.raises(ConfigError, match="LBFGS computes with all"):
        on_wholes(torch.optim.LBFGS([weight]))
