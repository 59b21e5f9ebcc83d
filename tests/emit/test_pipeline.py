"""Pipelines on real processes: microbatches, weights, ties, clipping, idle ranks, refusals, hangs."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.emit.build import emit
from autopar.emit.module import ParallelModule
from autopar.emit.torch_private import job_timeout
from autopar.errors import EmitError, PlanError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.verify import verify
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.pool import Pool

BATCH = 16
NAMES = ("skips", "deep gpt")


def batch(name: str, spread: bool = True) -> dict[str, Tensor]:
    """A batch of tokens; with `spread` off, the first microbatch of four has no target that counts."""
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 32, (BATCH, 8), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    if not spread:
        labels[:4] = -100
    return {"ids" if name == "skips" else "input_ids": ids, "labels": labels}


def rows(pm: ParallelModule, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a batch."""
    rank = pm.data_parallel_rank
    return {} if rank is None else {k: t.chunk(pm.data_parallel_size)[rank] for k, t in full.items()}


def reference(name: str, full: dict[str, Tensor]) -> tuple[Tensor, nn.Module]:
    """The loss on one device, and the model with its gradients."""
    model = example(name)[0]
    model.zero_grad()
    outcome = model(**full)
    loss: Tensor = outcome if isinstance(outcome, Tensor) else outcome["loss"]
    loss.backward()
    return loss.detach(), model


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor; a plain tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def assert_gradients(pm: ParallelModule, model: nn.Module, scale: float = 1.0) -> None:
    """The gradients of this rank's stages are those of the model."""
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in wanted.values())
    found = {n: whole(p.grad) for n, p in pm.named_parameters() if p.grad is not None}
    assert found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, scale * wanted[name], rtol=1e-9, atol=1e-12 * largest)


def counted(record: PlanRecord, graph: OpGraph, name: str) -> None:
    pm, full = emit(record, graph, example(name)[0], device="cpu"), batch(name, spread=False)
    loss, model = reference(name, full)
    for _ in range(2):
        torch.testing.assert_close(pm.train_step(**rows(pm, full)), loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(pm.eval_step(**rows(pm, full)), loss, rtol=1e-12, atol=0)
    assert_gradients(pm, model, 2.0)
    norm = pm.clip_grad_norm_(0.1)
    wanted = 2 * nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_accumulate_and_weigh_what_counts(pool: Pool, name: str, text: str) -> None:
    """Loss, gradients of two steps and their norm are the model's; one microbatch has no target that counts."""
    graph = traced(name)
    pool.run(4, counted, staged(graph, (text, text), (3, 3), "1f1b", 4, 2), graph, name)


def averaged(record: PlanRecord, graph: OpGraph, name: str) -> None:
    full, count = batch(name), record.num_microbatches
    pm = emit(record, graph, example(name)[0], device="cpu", loss="mean_of_means")
    parts = [x.chunk(pm.data_parallel_size * count) for x in full.values()]
    losses = []
    model = example(name)[0]
    model.zero_grad()
    for part in zip(*parts, strict=True):  # one microbatch of one replica
        outcome = model(**dict(zip(full, part, strict=True)))
        losses.append(outcome if isinstance(outcome, Tensor) else outcome["loss"])
    loss = torch.stack(losses).mean()
    loss.backward()
    torch.testing.assert_close(pm.train_step(**rows(pm, full)), loss.detach(), rtol=1e-12, atol=0)
    assert_gradients(pm, model)


@pytest.mark.parametrize("text", ["dp=2|dp=2", "dp=2,tp=2", "dp=4"])
def test_mean_of_means_is_what_replicas_alone_would_take(pool: Pool, text: str) -> None:
    """Each replica's mean over what counts in its own microbatch has the same weight, as in data-parallel training."""
    texts, graph = text.split("|"), traced("deep gpt")
    plan = staged(graph, (texts[0],) * 2, (3, 3), "1f1b", 4, 2) if len(texts) > 1 else one_stage(graph, text, 4, BATCH)
    pool.run(4, averaged, plan, graph, "deep gpt")


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("gpipe", 1), ("gpipe", 2), ("gpipe", 8), ("1f1b", 4), ("1f1b", 8), ("interleaved", 1), ("interleaved", 2),
     ("interleaved", 16)],
)  # fmt: skip
def test_any_number_of_microbatches(pool: Pool, schedule: str, microbatches: int) -> None:
    """Fewer microbatches than stages, as many, and more."""
    graph, several = traced("skips"), schedule == "interleaved"
    groups, counts = (2, (2, 1, 1, 2)) if several else (4, (2, 1, 1, 2))
    record = staged(graph, ("dp=1",) * groups, counts, schedule, microbatches)
    assert pool.run(groups, verified, record, graph, "skips")[0] < 1e-9


def verified(record: PlanRecord, graph: OpGraph, name: str) -> float:
    return verify(record, *example(name), graph=graph).largest


@pytest.mark.parametrize("text", ["dp=2,zero=2", "dp=2,zero=3,recompute=full", "tp=2"])
@pytest.mark.parametrize("name", NAMES)
def test_interleaved_stages_of_several_ranks(pool: Pool, name: str, text: str) -> None:
    """Two chunks on each of two groups of two ranks."""
    graph = traced(name)
    record = staged(graph, (text, text), (2, 1, 1, 2), "interleaved", 4, 2)
    assert pool.run(4, verified, record, graph, name)[0] < 1e-9


def optimise(record: PlanRecord, graph: OpGraph, name: str) -> None:
    pm, full = emit(record, graph, example(name)[0], device="cpu"), batch(name)
    optimizer = torch.optim.AdamW(pm.parameters(), foreach=True)
    for _ in range(2):
        pm.train_step(**rows(pm, full))
        optimizer.step()
        optimizer.zero_grad()
    found: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(found, whole(pm.get_parameter("head.weight").detach()))
    assert all(one.equal(found[0]) for one in found)


def test_tied_parameters_stay_equal(pool: Pool) -> None:
    """The copies of a tied parameter that several stages hold are the same after some steps."""
    graph = traced("deep gpt")
    pool.run(4, optimise, staged(graph, ("dp=2,zero=3",) * 2, (3, 3), "1f1b", 4, 2), graph, "deep gpt")


def shorter(record: PlanRecord, graph: OpGraph, name: str) -> str:
    pm = emit(record, graph, example(name)[0], device="cpu")
    for samples in (BATCH, BATCH // 2, BATCH):
        full = {k: t[:samples] for k, t in batch(name).items()}
        loss, model = reference(name, full)
        pm.zero_grad()
        torch.testing.assert_close(pm.train_step(**rows(pm, full)), loss, rtol=1e-12, atol=0)
        assert_gradients(pm, model)
    mine = rows(pm, {k: t[: BATCH - 4] for k, t in batch(name).items()})
    with pytest.raises(EmitError) as caught:
        pm.train_step(**{k: t[: 4 - pm.data_parallel_rank] for k, t in mine.items()})  # type: ignore[operator]
    torch.testing.assert_close(pm.train_step(**rows(pm, full)), loss, rtol=1e-12, atol=0)
    return str(caught.value)


@pytest.mark.parametrize(("schedule", "counts"), [("1f1b", (3, 3)), ("zbv", (2, 1, 1, 2))])
def test_a_short_batch(pool: Pool, schedule: str, counts: tuple[int, ...]) -> None:
    """Half a batch between whole ones gives the model's loss and gradients; rows that differ by rank are refused."""
    graph = traced("deep gpt")
    record = staged(graph, ("dp=2,zero=3",) * 2, counts, schedule, 4, 2)
    for said in pool.run(4, shorter, record, graph, "deep gpt"):
        assert "the ranks passed 4, 3 samples; under this pipeline all have to pass equally many" in said


def idle(record: PlanRecord, graph: OpGraph) -> None:
    pm, full = emit(record, graph, example("skips")[0], device="cpu"), batch("skips")
    assert (pm.data_parallel_rank is None) == (dist.get_rank() == 2)
    loss, _ = reference("skips", full)
    for take in (pm.train_step, pm.eval_step):
        torch.testing.assert_close(take(**rows(pm, full)), loss, rtol=1e-12, atol=0)


def test_idle_ranks_return_the_loss(pool: Pool) -> None:
    """A rank outside the pipeline takes nothing and returns the loss of the others."""
    graph = traced("skips")
    record = staged(graph, ("dp=1", "dp=1"), (3, 3), "1f1b", 4)
    pool.run(3, idle, replace(record, request=replace(record.request, devices=3)), graph)


def refused(graph: OpGraph) -> None:
    record = staged(graph, ("dp=1", "dp=1"), (3, 3), "1f1b", 4)
    model = example("skips")[0]
    with pytest.raises(EmitError, match="zbv needs 2 stages for each of 2 groups, not 2"):
        emit(replace(record, schedule="zbv"), graph, model, device="cpu")
    with pytest.raises(EmitError, match="1f1b needs a microbatch for each"):
        emit(replace(record, num_microbatches=1), graph, model, device="cpu")
    with pytest.raises(PlanError, match="start at layers"):
        emit(replace(record, stages=(record.stages[0], record.stages[0])), graph, model, device="cpu")
    pm = emit(record, graph, model, device="cpu")
    with pytest.raises(EmitError, match="train_step"):
        pm(**rows(pm, batch("skips")))


def test_refusals(pool: Pool) -> None:
    """Stages that don't suit the schedule, too few microbatches, gaps, and `pm(...)` are refused with the remedy."""
    pool.run(2, refused, traced("skips"))


def refused_ties(record: PlanRecord, graph: OpGraph) -> None:
    with pytest.raises(PlanError, match=r"embed\.weight"):
        emit(record, graph, example("deep gpt")[0], device="cpu")


def test_tied_parameters_must_lie_alike(pool: Pool) -> None:
    """A tied parameter cut up in one stage and whole in another is refused by name."""
    graph = traced("deep gpt")
    pool.run(4, refused_ties, staged(graph, ("dp=2", "tp=2"), (3, 3), "1f1b", 4, 2), graph)


def hang(record: PlanRecord, graph: OpGraph, store: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    timeout = timedelta(seconds=4)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    assert job_timeout() == timeout
    pm, full = emit(record, graph, example("skips")[0], device="cpu"), batch("skips")
    pm.train_step(**rows(pm, full))
    if rank < 2:
        time.sleep(7)
        return ""
    with pytest.raises(EmitError) as caught:
        pm.train_step(**rows(pm, full))
    return str(caught.value)


def test_a_hang_ends_in_a_timeout(pool: Pool, tmp_path: Path) -> None:
    """What waits for a rank that does nothing ends after the job's timeout, naming its own rank and step."""
    graph = traced("skips")
    record = staged(graph, ("dp=2", "dp=2"), (3, 3), "1f1b", 4, 2)
    found = pool.run(4, hang, record, graph, str(tmp_path / "store"))
    assert "rank 2 at step 2" in found[2]
    assert "imed out" in found[2]
