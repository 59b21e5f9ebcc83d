"""Kernels on real processes against the ATen op on one device, and the masks of dropout."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.graph import REPLICATE, Extent, LayerClass, Layout, Op, TensorSpec
from autopar.plan import LayerStrategy
from autopar.shard import vocabulary
from autopar.shard.kernels import KERNELS, dropout
from autopar.shard.localize import CallInfo, Share
from autopar.shard.lower import lower
from autopar.shard.masks import keep_mask
from autopar.shard.program import Call
from autopar.shard.relayout import gradient_layout
from autopar.shard.rules import assignments, rule_for
from autopar.shard.table import RULES
from tests.pool import Pool
from tests.shard.interpreter import Mesh, make_op, run, run_whole
from tests.shard.transformer import B, spec

BATCH = 8


def layer_of(op: Op, **values: TensorSpec) -> LayerClass:
    """A layer of one op on all of `values` but its result."""
    return LayerClass(tuple(n for n in values if n not in op.results), (), (), (op,), op.results, values)


def cases(classes: int) -> dict[str, LayerClass]:
    """Ops that run as kernels, in their variants."""
    labels, rows = spec(B, dtype="int64", grad=False), spec(B, classes)
    found = {}
    for reduction, smoothing in ((0, 0.0), (1, 0.0), (2, 0.0), (1, 0.1)):
        op = make_op("y", "aten.cross_entropy_loss.default", "x", "t", None, reduction, -100, smoothing)
        found[f"rows, reduction {reduction}, smoothing {smoothing}"] = layer_of(
            op, x=rows, t=labels, y=spec(B) if reduction == 0 else spec()
        )
    mean = make_op("y", "aten.cross_entropy_loss.default", "x", "t")
    found["images"] = layer_of(mean, x=spec(B, classes, 4), t=spec(B, 4, dtype="int64", grad=False), y=spec())
    found["one row"] = layer_of(mean, x=spec(classes), t=spec(dtype="int64", grad=False), y=spec())
    rule = make_op("y", "aten.embedding.default", "w", "t", 3)
    found["embedding"] = layer_of(rule, w=spec(classes, 4), t=spec(B, 4, dtype="int64", grad=False), y=spec(B, 4, 4))
    found["mean"] = layer_of(make_op("y", "aten.mean.default", "x"), x=rows, y=spec())
    found["mean over dims"] = layer_of(make_op("y", "aten.mean.dim", "x", (0, -1)), x=spec(B, 4, classes), y=spec(4))
    found["squared error"] = layer_of(make_op("y", "aten.mse_loss.default", "x", "z"), x=rows, z=rows, y=spec())
    return found


def inputs_of(layer: LayerClass, batch: int, classes: int) -> dict[str, Tensor]:
    """Random inputs, some labels ignored (of embeddings none)."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in layer.inputs:
        shape = layer.values[name].shape_at(batch)
        if layer.values[name].dtype == "int64":
            found[name] = torch.randint(0, classes, shape, generator=generator)
            if "cross_entropy" in layer.ops[0].target and shape:
                found[name].view(-1)[::3] = -100
        else:
            found[name] = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    return found


def evaluate(values: dict[str, Tensor], layer: LayerClass, runner: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Result and inputs as leaves that know their gradients, the result's own gradient being its cosine."""
    leaves = {n: t.clone().requires_grad_(layer.values[n].requires_grad) for n, t in values.items()}
    result = runner(leaves)
    torch.autograd.backward(result, torch.cos(torch.arange(result.numel(), dtype=result.dtype)).view(result.shape))
    return result.detach(), leaves


def wrong_cases(sizes: tuple[int, ...], batch: int, classes: int) -> list[str]:
    """Variants and factors whose result or gradients differ from one device's."""
    mesh, wrong = Mesh(sizes), []
    for name, layer in cases(classes).items():
        op, whole = layer.ops[0], inputs_of(layer, batch, classes)
        rule = rule_for(op, layer)
        assert rule is not None
        truth, true_leaves = evaluate(whole, layer, lambda v, layer=layer: run_whole(layer, batch, v)["y"])
        for factors in assignments(rule, op, layer, sizes, batch):
            found = run_sharded(layer, mesh, factors, whole, batch)
            wanted = {"y": truth} | {n: t.grad for n, t in true_leaves.items() if t.grad is not None}
            if found.keys() != wanted.keys() or any(not torch.allclose(found[n], wanted[n], 1e-12) for n in wanted):
                wrong.append(f"{name}: {factors}")
    return wrong


def run_sharded(
    layer: LayerClass, mesh: Mesh, factors: tuple[str, ...], whole: dict[str, Tensor], batch: int
) -> dict[str, Tensor]:
    """Result and gradients, whole, of an op run on shards between replicated inputs and result."""
    replicated = (REPLICATE,) * len(mesh.sizes)
    strategy = LayerStrategy(replicated, replicated, {"y": factors}, {})
    anything = layer.values[layer.inputs[0]]
    program = lower(layer, strategy, mesh.sizes, anything, anything)
    (output,) = program.outputs
    local = {n: mesh.shard(t, program.layouts[n]) for n, t in whole.items()}
    result, leaves = evaluate(local, layer, lambda v: run(program, mesh, batch, v)[output])
    held = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    gradients = {n: mesh.whole(g, gradient_layout(program.layouts[n])) for n, g in held.items()}
    return {"y": mesh.whole(result, program.layouts[output])} | gradients


@pytest.mark.parametrize(("sizes", "batch", "classes"), [((4,), 8, 12), ((2, 2), 9, 10), ((4,), 9, 5)])
def test_kernels_equal_the_op_on_one_device(pool: Pool, sizes: tuple[int, ...], batch: int, classes: int) -> None:
    """Every legal split of losses, embeddings and means gives the op's own result and gradients, fp64.

    Rows and classes that don't divide give unequal shards, and some ranks nothing.
    """
    assert pool.run(4, wrong_cases, sizes, batch, classes) == [[]] * 4


def test_every_kernel_of_the_rules_exists() -> None:
    """Each kernel a line of the table names is there."""
    named = {note.split()[1] for line in RULES.values() if isinstance(line, str) for note in _notes(line)}
    assert named <= KERNELS.keys()


def _notes(line: str) -> list[str]:
    return [n.strip() for n in line.partition("|")[2].split(",") if ":" in n]


def low_precision_loss() -> tuple[float, float, list[tuple[str, int]]]:
    """Of bfloat16 logits split by class: differences of loss and gradient, and what is saved for backward."""
    mesh = Mesh((4,))
    whole, target = torch.randn(16, 64).to(torch.bfloat16), torch.randint(0, 64, (16,))
    exact = whole.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(exact, target)
    torch.autograd.backward(truth)
    local = mesh.shard(whole, (1,)).requires_grad_()
    saved: list[tuple[str, int]] = []

    def note(t: Tensor) -> Tensor:
        saved.append((str(t.dtype), t.numel()))
        return t

    vocabulary.CHUNK_ELEMENTS = 64  # several chunks
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        losses = vocabulary.vocabulary_cross_entropy(local, target, 16 * mesh.place[0], -100, mesh.names[0,])
    torch.autograd.backward(losses.mean())
    assert local.grad is not None
    assert exact.grad is not None
    gradient = (mesh.whole(local.grad, (1,)).double() - exact.grad).abs().max() / exact.grad.abs().max()
    return abs(float(losses.mean() - truth)), float(gradient), saved


def test_class_parallel_loss_of_bfloat16_logits(pool: Pool) -> None:
    """Loss exact to float32, gradient to its own dtype; one float32 a row is kept beside the operands."""
    for loss, gradient, saved in pool.run(4, low_precision_loss):
        assert loss < 1e-5
        assert gradient < 2**-8
        assert sorted(saved) == [("torch.bfloat16", 16 * 16), ("torch.float32", 16), ("torch.int64", 16)]


def all_ignored() -> bool:
    """Whether the mean over no rows at all is nan, as on one device."""
    mesh = Mesh((4,))
    info = CallInfo("aten.cross_entropy_loss.default", Share(4, mesh.names[0,]))
    loss = KERNELS["cross_entropy"](info, torch.zeros(2, 3), torch.full((2,), -100))
    return bool(loss.isnan())


def test_mean_of_no_rows(pool: Pool) -> None:
    """With all targets ignored the mean is nan, as ATen has it."""
    assert pool.run(4, all_ignored) == [True] * 4


# --- dropout --------------------------------------------------------------------------------------------------------


def draw(seed: int, samples: list[int]) -> Tensor:
    return torch.tensor([seed, *samples])


def info_of(shape: tuple[int, ...], samples: int, salt: str = "a", batch_dim: int = 0) -> CallInfo:
    whole = tuple(Share(length=n) for n in shape)
    return CallInfo("aten.dropout.default", shape=shape, dims=whole, batch_dim=batch_dim, samples=samples, salt=salt)


def masks_differ(sizes: tuple[int, ...], shape: tuple[Extent | int, ...], batch: int) -> list[Layout]:
    """Layouts under which ranks draw other masks than one device."""
    mesh, wanted = Mesh(sizes), spec(*shape)
    layer = layer_of(make_op("y", "aten.dropout.default", "x", 0.3, True), x=wanted, y=wanted)
    whole = torch.ones(wanted.shape_at(batch), dtype=torch.float64)
    samples = draw(7, [3, 1, 4, 15, 9, 2, 6, 5][:batch])
    one_device = info_of(tuple(whole.shape), batch, "y", -1 if wanted.batch_dim is None else 0)
    truth = dropout(one_device, whole, 0.3, draw=samples)
    wrong = []
    for layout in product((*range(len(shape)), REPLICATE), repeat=len(sizes)):
        strategy = LayerStrategy(layout, layout, {"y": tuple("" if d < 0 else f"d{d}" for d in layout)}, {})
        program = lower(layer, strategy, sizes, wanted, wanted)
        assert [s.kernel for s in program.steps if isinstance(s, Call)] == ["dropout"]
        values = run(program, mesh, batch, {"x": mesh.shard(whole, layout, wanted)}, samples)
        if not mesh.whole(values["y"], layout).equal(truth):
            wrong.append(layout)
    return wrong


@pytest.mark.parametrize(
    ("shape", "batch"), [((B, 4, 12), 8), ((Extent(4), 12), 8), ((4, 8), 8), ((B, 3, 5), 7), ((Extent(3), 6), 7)]
)
def test_masks_do_not_depend_on_the_layout(pool: Pool, shape: tuple[Extent | int, ...], batch: int) -> None:
    """Every layout over two axes draws the one-device mask, the batch on its own, merged with others, or absent."""
    assert pool.run(4, masks_differ, (2, 2), shape, batch) == [[]] * 4


def test_masks_do_not_depend_on_microbatches() -> None:
    """A microbatch draws for its samples what the whole batch draws for them."""
    whole = keep_mask(info_of((8, 3, 5), 8), draw(1, list(range(8))), 0.5)
    part = keep_mask(info_of((2, 3, 5), 2), draw(1, [6, 1]), 0.5)
    assert part.equal(whole[[6, 1]])


def test_masks_are_fair_and_independent() -> None:
    """Share kept within 5 standard errors, of neighbours in each dim, seeds and ops kept together likewise."""
    shape, p = (16, 64, 1024), 0.3
    mask = keep_mask(info_of(shape, 16), draw(1, list(range(16))), p)
    others = [
        keep_mask(info_of(shape, 16), draw(2, list(range(16))), p),
        keep_mask(info_of(shape, 16, "b"), draw(1, list(range(16))), p),
        *(mask.roll(shift, dim) for dim in range(3) for shift in (1, 2, 8)),
    ]
    error = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float(mask.double().mean()) - (1 - p)) < 5 * error
    for other in others:
        assert abs(float((mask & other).double().mean()) - (1 - p) ** 2) < 5 * error
    by_row, by_column = mask.double().mean(2).std(), mask.double().mean((0, 1)).std()
    assert float(by_row) == pytest.approx((p * (1 - p) / 1024) ** 0.5, rel=0.1)
    assert float(by_column) == pytest.approx((p * (1 - p) / 1024) ** 0.5, rel=0.1)


def test_dropout_scales_and_masks_the_gradient() -> None:
    """What is kept is scaled by 1 / (1 - p), in value and gradient; p = 1 keeps nothing."""
    x = torch.ones(4, 6, dtype=torch.bfloat16, requires_grad=True)
    info, seed = info_of((4, 6), 4), draw(3, [0, 1, 2, 3])
    y, mask = dropout(info._replace(target="aten.native_dropout.default"), x, 0.5, draw=seed)
    torch.autograd.backward(y.sum())
    assert y.equal(mask * 2.0)
    assert x.grad is not None
    assert x.grad.equal((mask * 2.0).to(torch.bfloat16))
    assert dropout(info, x, 1.0, draw=seed).count_nonzero() == 0
    assert dropout(info, x, 0.0, draw=seed).equal(x)
