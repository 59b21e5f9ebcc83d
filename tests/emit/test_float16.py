"""Plans that compute in float16: the scale of the loss under every kind of plan, on real processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.checkpoints import Checkpoints
from autopar.emit.build import emit
from autopar.emit.loss_scale import LARGEST, PATIENCE, LossScale
from autopar.emit.module import ParallelModule
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from tests.checkpoints.runs import whole
from tests.integration.staged import one_stage
from tests.integration.strategies import Language
from tests.pool import Pool

BATCH, LENGTH, VOCABULARY = 8, 8, 64
FAINT = 2.0**-16
"""By what the loss is multiplied: most gradients are then below what float16 can hold."""

TOO_LARGE = 2.0**20
"""More than float16 holds."""

PLANS = (
    "dp=4,zero=1", "dp=2,tp=2,zero=3,sp=1", "pp=2,dp=2,zero=2,schedule=zb,recompute=full", "dp=4,zero=3", "tp=4",
    "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2,zero=1,schedule=gpipe", "dp=4,zero=2,recompute=selective",
)  # fmt: skip


class Faint(nn.Module):
    """A language model whose loss, and gradients, are very small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.language = Language(width=32, heads=4, kv_heads=4, inner=64, vocab=VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.language(ids, labels) * FAINT
        return loss


def inputs(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "labels": ids.flip(1)}


@cache
def planned(text: str) -> tuple[OpGraph, PlanRecord]:
    graph = trace(Faint(), inputs(), compute_dtype="float16")
    return graph, one_stage(graph, text, 4, BATCH, "fp16")


def gradients(graph: OpGraph, plan: PlanRecord) -> dict[str, Tensor]:
    """Of this rank's parameters, whole, after a step."""
    pm = emit(plan, graph, Faint(), device="cpu")
    rows = pm.data_parallel_rows()
    assert rows is not None
    pm.train_step(**{n: x[rows.start : rows.stop] for n, x in inputs(BATCH).items()})
    return {n: whole(p.grad) for n, p in pm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("text", [*PLANS[:3], *(pytest.param(text, marks=pytest.mark.slow) for text in PLANS[3:])])
def test_small_gradients_are_not_lost(pool: Pool, text: str) -> None:
    """Gradients near or below the smallest float16 are those of one device in float64, to float16's precision."""
    model = Faint().double()
    model(**inputs(BATCH)).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert torch.cat([g.flatten() for g in wanted.values()]).abs().median() < 2.0**-20  # four of ten bits are left
    found: dict[str, Tensor] = {}
    for of_rank in pool.run(4, gradients, *planned(text)):
        found |= of_rank
    assert {*found} == {*wanted}
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).abs().max() <= 0.01 * gradient.abs().max(), name


def step(pm: ParallelModule, scale: float) -> None:
    """A training step under a scale of the loss."""
    rows = pm.data_parallel_rows()
    assert rows is not None
    assert pm.loss_scale is not None
    pm.loss_scale.value = scale
    pm.train_step(**{n: x[rows.start : rows.stop] for n, x in inputs(BATCH).items()})


def overflown(graph: OpGraph, plan: PlanRecord, folder: str) -> list[float]:
    """Scales: after a step that overflows, and loaded from a checkpoint; parameters stay what they are."""
    pm = emit(plan, graph, Faint(), device="cpu")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.1)
    assert pm.loss_scale is not None
    before = {n: whole(p).clone() for n, p in pm.named_parameters()}
    step(pm, TOO_LARGE)
    assert all(p.grad is None for p in pm.parameters())
    assert float(pm.clip_grad_norm_(1.0)) == 0.0
    optimizer.step()
    assert all(torch.equal(whole(p), before[n]) for n, p in pm.named_parameters())
    Checkpoints(folder).save(1, pm, optimizer)
    again = emit(plan, graph, Faint(), device="cpu")
    assert again.loss_scale is not None
    Checkpoints(folder).load(again, torch.optim.AdamW(again.parameters(), lr=0.1))
    return [pm.loss_scale.value, again.loss_scale.value]


def test_a_step_that_overflows_is_none(pool: Pool, tmp_path: Path) -> None:
    """No rank has gradients then, optimizers do nothing, the scale is half; a checkpoint keeps it."""
    found = pool.run(4, overflown, *planned(PLANS[1]), str(tmp_path))
    assert found == [[2.0**19, 2.0**19]] * 4


def accumulated(graph: OpGraph, plan: PlanRecord) -> bool:
    """Whether gradients of a step are left by one that overflows, and zeros are not."""
    pm = emit(plan, graph, Faint(), device="cpu")
    step(pm, LARGEST)
    before = {n: whole(p.grad).clone() for n, p in pm.named_parameters() if p.grad is not None}
    step(pm, TOO_LARGE)
    kept = all(torch.equal(whole(p.grad), before[n]) for n, p in pm.named_parameters() if p.grad is not None)
    held = sum(p.grad is not None for p in pm.parameters())
    for parameter in pm.parameters():
        parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
    step(pm, TOO_LARGE)
    return kept and held == len(before) > 0 and all(p.grad is None for p in pm.parameters())


@pytest.mark.parametrize("text", ["dp=2,tp=2,zero=3,sp=1", "pp=2,dp=2,zero=2,schedule=zb,recompute=full"])
def test_a_step_that_overflows_leaves_gradients_of_others(pool: Pool, text: str) -> None:
    """What earlier steps have added to `.grad` stays; zeros, with which an optimizer would step, do not."""
    assert pool.run(4, accumulated, *planned(text)) == [True] * 4


def one_overflows() -> tuple[bool, float, list[float]]:
    """What ranks make of gradients of which one has an infinite one."""
    scale = LossScale()
    gradients = [torch.full((3,), 2.0), torch.zeros(0), torch.full((), 4.0)]
    if dist.get_rank() == 2:
        gradients[0][1] = float("inf")
    used = scale.take(gradients, dist.group.WORLD, torch.device("cpu"))
    return used, scale.value, [float(gradients[0][0]), float(gradients[2])]


def test_all_ranks_agree(pool: Pool) -> None:
    """One infinite value on one rank is an overflow on all; what is finite is divided by the scale that was."""
    assert pool.run(4, one_overflows) == [(False, LARGEST / 2, [2 / LARGEST, 4 / LARGEST])] * 4


def test_the_scale_follows_overflows() -> None:
    """It falls by halves to 1, where gradients are left as they are, and doubles after so many steps without."""
    scale, cpu = LossScale(), torch.device("cpu")

    def step(value: float) -> bool:
        return scale.take([torch.tensor([value])], None, cpu)

    assert [step(float("nan")) for _ in range(16)] == [False] * 15 + [True]
    assert scale.value == 1.0
    assert all(step(1.0) for _ in range(PATIENCE - 1))
    assert scale.value == 2.0
    assert not step(float("inf"))
    assert all(step(1.0) for _ in range(PATIENCE))
    assert scale.value == 2.0
