"""The parallel module on real processes: training, gradients, checkpoints, dropout, idle ranks."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor

from autopar.emit.build import emit, emit_alone
from autopar.emit.module import ParallelModule
from autopar.errors import EmitError
from autopar.graph import REPLICATE, OpGraph
from autopar.plan import LayerStrategy, PlanRecord
from autopar.trace.capture import trace
from autopar.trace.models.spec import load_model
from autopar.verify import verify
from tests.emit.handmade import data_parallel, mesh_of, record_of
from tests.integration.models import Mlp, example, traced
from tests.integration.staged import one_stage
from tests.pool import Pool, RankError

BATCH = 16
GPT = "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=4"


def batch() -> dict[str, Tensor]:
    """A batch whose targets that count are very unevenly spread over ranks and microbatches."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 8, (BATCH,), generator=generator)
    labels[:3] = labels[4] = -100
    return {"x": torch.randn(BATCH, 16, generator=generator, dtype=torch.float64), "labels": labels}


def rows(pm: ParallelModule, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a batch."""
    rank = pm.data_parallel_rank
    return {} if rank is None else {k: t.chunk(pm.data_parallel_size)[rank] for k, t in full.items()}


def plan(
    graph: OpGraph,
    zeros: tuple[int, ...],
    sizes: tuple[int, ...] = (4,),
    microbatches: int = 1,
    dtype: str = "fp64",
) -> PlanRecord:
    """Data parallel over all axes, layer i under ZeRO `zeros[i]` (the last for all further ones)."""

    def strategy(i: int) -> LayerStrategy:
        return data_parallel(graph, i, [True] * len(sizes), zeros[min(i, len(zeros) - 1)])

    return record_of(
        graph, mesh_of(*sizes), strategy, global_batch=BATCH, num_microbatches=microbatches, dtype=dtype, devices=4
    )


def parallel_mlp(
    graph: OpGraph, zeros: tuple[int, ...], sizes: tuple[int, ...] = (4,), microbatches: int = 1
) -> ParallelModule:
    return emit(plan(graph, zeros, sizes, microbatches), graph, example("mlp")[0], device="cpu")


def whole_gradients(pm: ParallelModule) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in pm.named_parameters() if p.grad is not None}


def whole(tensor: Tensor | None) -> Tensor:
    """All of a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def reference(scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the batch on one device, and its gradients times `scale`."""
    model = example("mlp")[0]
    model.zero_grad()
    loss = model(**batch())
    loss.backward()
    return loss.detach(), {n: p.grad * scale for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


ZEROS = [(0,), (1,), (2,), (3,), (1, 3, 0)]


def step_with_microbatches(graph: OpGraph, zeros: tuple[int, ...]) -> None:
    pm = parallel_mlp(graph, zeros, (2, 2), microbatches=4)
    loss, gradients = reference()
    torch.testing.assert_close(pm.train_step(**rows(pm, batch())), loss, rtol=1e-12, atol=0)
    assert_same(whole_gradients(pm), gradients)


@pytest.mark.parametrize("zeros", ZEROS)
def test_microbatches_weigh_what_counts_in_them(pool: Pool, zeros: tuple[int, ...]) -> None:
    """With ignored targets spread unevenly (one microbatch has none that count) the loss is that of the whole batch."""
    pool.run(4, step_with_microbatches, traced("mlp"), zeros)


def accumulate(graph: OpGraph, zeros: tuple[int, ...]) -> None:
    pm = parallel_mlp(graph, zeros)
    for _ in range(2):
        loss = pm(**rows(pm, batch()))
        loss.backward()
    assert_same(whole_gradients(pm), reference(2.0)[1])
    pm.zero_grad()
    assert not whole_gradients(pm)


@pytest.mark.parametrize("zeros", ZEROS)
def test_backward_calls_accumulate(pool: Pool, zeros: tuple[int, ...]) -> None:
    """`loss.backward()` leaves synchronised gradients, and a second one adds to them."""
    pool.run(4, accumulate, traced("mlp"), zeros)


def optimise(graph: OpGraph, kind: str) -> None:
    pm = parallel_mlp(graph, (1, 3, 0), (2, 2))
    model = Mlp().double()
    model.load_state_dict(example("mlp")[0].state_dict())
    ours, theirs = optimizers(kind, pm), optimizers("plain", model)
    for _ in range(3):
        pm.train_step(**rows(pm, batch()))
        model(**batch()).backward()
        norm = pm.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1), rtol=1e-12, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = {n: whole(p) for n, p in pm.state_dict().items()}
    assert_same(found, {n: p.detach() for n, p in model.state_dict().items()})
    torch.testing.assert_close(pm.eval_step(**rows(pm, batch())), model(**batch()).detach(), rtol=1e-12, atol=0)


def optimizers(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=kind == "foreach", fused=kind == "fused")


@pytest.mark.parametrize("kind", ["foreach", "fused", "plain"])
def test_optimizers_and_clipping(pool: Pool, kind: str) -> None:
    """Every kind of AdamW steps parameters that lie over different meshes, clipped by the norm of the whole model."""
    pool.run(4, optimise, traced("mlp"), kind)


def save(graph: OpGraph, folder: str) -> None:
    save_checkpoint(parallel_mlp(graph, (3,)).state_dict(), checkpoint_id=folder)


def load(graph: OpGraph, folder: str) -> None:
    pm = parallel_mlp(graph, (1, 0, 3), (2, 2))
    wanted = {n: whole(t) for n, t in pm.state_dict().items()}
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.zero_()
    state = pm.state_dict()
    load_checkpoint(state, checkpoint_id=folder)
    pm.load_state_dict(state)
    assert_same({n: whole(t) for n, t in pm.state_dict().items()}, wanted)
    torch.testing.assert_close(pm.train_step(**rows(pm, batch())), reference()[0], rtol=1e-12, atol=0)


def test_checkpoint_into_another_layout(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint of one plan is loaded by another, and trained on."""
    pool.run(4, save, traced("mlp"), str(tmp_path))
    pool.run(4, load, traced("mlp"), str(tmp_path))


def on_meta(graph: OpGraph, zeros: tuple[int, ...]) -> None:
    loaded = load_model(GPT)
    record = plan(graph, zeros, dtype="fp32")
    pm = emit(record, graph, loaded.model, device="cpu")
    alone = emit_alone(record, graph, loaded.model, device="cpu")
    values = {n: whole(t) for n, t in pm.state_dict().items()}
    assert list(values) == list(loaded.model.state_dict())
    assert_same(values, dict(alone.state_dict()))
    assert float(values["blocks.0.mlp.up_proj.weight"].std()) > 0
    assert values["head.weight"].equal(values["embed.weight"])


@pytest.mark.parametrize("zeros", [(0,), (3,)])
def test_meta_model_gets_values_that_do_not_depend_on_the_plan(pool: Pool, zeros: tuple[int, ...]) -> None:
    """A model on meta is initialised to the same values on one device and on four; tied names stay tied."""
    loaded = load_model(GPT)
    pool.run(4, on_meta, trace(loaded.model, loaded.inputs, compute_dtype="float32"), zeros)


def let_go(graph: OpGraph) -> None:
    model = copy.deepcopy(example("mlp")[0])
    seen = weakref.ref(model)
    pm = emit(plan(graph, (1,), (4,), 2), graph, model, device="cpu")
    del model
    gc.collect()
    assert seen() is None
    pm.train_step(**rows(pm, batch()))


def test_the_model_itself_is_let_go(pool: Pool) -> None:
    """Nothing of the parallel module holds on to the model it was made of: each parameter is held once."""
    pool.run(4, let_go, traced("mlp"))


def some_idle(graph: OpGraph) -> None:
    pm = emit(plan(graph, (1,), (2,), 2), graph, example("mlp")[0], device="cpu")
    assert (pm.data_parallel_rank is None) == (dist.get_rank() >= 2)
    assert bool(list(pm.parameters())) == (dist.get_rank() < 2)
    for take in (pm.train_step, pm.eval_step):
        torch.testing.assert_close(take(**rows(pm, batch())), reference()[0], rtol=1e-12, atol=0)


def test_idle_ranks_return_the_loss(pool: Pool) -> None:
    """Ranks outside the plan hold nothing, take nothing, and return the loss of the others."""
    pool.run(4, some_idle, traced("mlp"))


def different(graph: OpGraph) -> None:
    emit(plan(graph, (dist.get_rank() % 2,)), graph, example("mlp")[0], device="cpu")


def test_ranks_must_have_one_plan(pool: Pool) -> None:
    """Where ranks come with different plans all of them say so instead of waiting for each other."""
    with pytest.raises(RankError, match="the ranks of this job have different plans"):
        pool.run(4, different, traced("mlp"))


class Dropping(nn.Module):
    """A layer with dropout around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.inner(x)), 0.3, self.training)
        hidden = nn.functional.dropout(hidden, 0.2, self.training)
        return nn.functional.cross_entropy(self.outer(hidden), labels)


DROPPING_INPUTS = {"x": torch.zeros(2, 16), "labels": torch.zeros(2, dtype=torch.long)}


def drop(graph: OpGraph) -> tuple[float, str, float]:
    torch.manual_seed(3)
    model = Dropping()
    report = verify(plan(graph, (0, 3), (2, 2), 2), model, DROPPING_INPUTS, graph=graph)
    pm = emit(plan(graph, (0,), (4,)), graph, model, device="cpu")
    full = batch()
    losses = [pm.eval_step(**rows(pm, full)) for _ in range(2)]
    torch.testing.assert_close(losses[0], model.double().eval()(**full).detach(), rtol=1e-12, atol=0)
    one, two = (pm.train_step(**rows(pm, full)) for _ in range(2))
    assert pm.steps == 2, "only training steps count"
    return report.largest, report.reference, float((one - two).abs())


def test_dropout_draws_the_same_masks_everywhere(pool: Pool) -> None:
    """Masks agree between one device and four with microbatches, change from step to step, and are off in eval."""
    largest, about, change = pool.run(4, drop, trace(Dropping(), DROPPING_INPUTS, compute_dtype="float64"))[0]
    assert largest < 1e-9
    assert "one device" in about
    assert change > 1e-3


def short_batches(graph: OpGraph) -> list[str]:
    pm, full = parallel_mlp(graph, (3,), microbatches=2), batch()
    for split in ((2, 2, 2, 2), (4, 3, 2, 1), (4, 4, 0, 0), (1, 1, 1, 1)):
        ends = [sum(split[: i + 1]) for i in range(4)]
        mine = slice(ends[dist.get_rank()] - split[dist.get_rank()], ends[dist.get_rank()])
        model = example("mlp")[0]
        model.zero_grad()
        loss = model(**{k: t[: ends[-1]] for k, t in full.items()})
        loss.backward()
        pm.zero_grad()
        torch.testing.assert_close(
            pm.train_step(**{k: t[mine] for k, t in full.items()}), loss.detach(), rtol=1e-12, atol=0
        )
        assert_same(whole_gradients(pm), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    with pytest.raises(EmitError, match=r"9 samples on all ranks \(3, 2, 2, 2\) can't be cut into 2"):
        pm.train_step(**{k: t[: 3 if dist.get_rank() == 0 else 2] for k, t in full.items()})
    with pytest.raises(EmitError, match="without samples has no loss"):
        pm.eval_step(**{k: t[:0] for k, t in full.items()})
    return []


def test_a_short_last_batch(pool: Pool) -> None:
    """However fewer rows are split over the ranks, loss and gradients are the model's; what can't be cut is refused."""
    pool.run(4, short_batches, traced("mlp"))


def whole_gradient(graph: OpGraph, zero: int) -> float:
    def strategy(i: int) -> LayerStrategy:
        found = data_parallel(graph, i, [True, True], zero)
        names = [n for n in found.relays if "positions" in n]
        return replace(found, relays=found.relays | dict.fromkeys(names, (REPLICATE, REPLICATE)))

    record = record_of(graph, mesh_of(2, 2), strategy, global_batch=BATCH, num_microbatches=2)
    assert any("positions" in n for n in strategy(0).relays)
    return verify(record, *example("gpt"), graph=graph).largest


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_that_every_rank_holds_whole_are_not_summed_again(pool: Pool, zero: int) -> None:
    """A parameter stored replicated over data axes (position embeddings) is dealt out, its gradient only cut."""
    assert pool.run(4, whole_gradient, traced("gpt"), zero)[0] < 1e-9


def mixed_precision(graph: OpGraph, zeros: tuple[int, ...]) -> tuple[float, set[str]]:
    pm = emit(plan(graph, zeros, dtype="bf16", microbatches=2), graph, example("mlp")[0], device="cpu")
    loss = pm.train_step(**rows(pm, batch()))
    wanted, gradients = reference()
    found = whole_gradients(pm)
    scale = max(float(g.abs().max()) for g in gradients.values())
    apart = max(float((found[n] - g).abs().max()) for n, g in gradients.items()) / scale
    return max(apart, abs(float(loss - wanted))), {str(t.dtype) for p in pm.parameters() for t in (p, whole(p.grad))}


@pytest.mark.parametrize("zeros", ZEROS)
def test_bf16_keeps_master_weights_and_gradients_in_float32(pool: Pool, zeros: tuple[int, ...]) -> None:
    """Under bf16 parameters and gradients are float32, and the gradients those of float64 within bf16's rounding."""
    apart, dtypes = pool.run(4, mixed_precision, traced("mlp", "bfloat16"), zeros)[0]
    assert apart < 0.05
    assert dtypes == {"torch.float32"}


def made_on_meta(record: PlanRecord, graph: OpGraph) -> dict[str, tuple[str, tuple[int, ...]]]:
    pm = emit(record, graph, example("gpt")[0], device="meta")
    return {n: (p.device.type, tuple(p.shape)) for n, p in pm.named_parameters()}


def test_modules_on_meta(pool: Pool) -> None:
    """On meta a module has all parameters, whole and without values, also those that FSDP keeps."""
    graph, wanted = traced("gpt"), {n: ("meta", tuple(p.shape)) for n, p in example("gpt")[0].named_parameters()}
    for text in ("dp=2,zero=3", "tp=2"):
        assert pool.run(2, made_on_meta, one_stage(graph, text, 2, 16), graph) == [wanted] * 2
