"""Batch norm over samples on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.graph import REPLICATE, Extent, LayerClass, Op, TensorSpec
from autopar.plan import LayerStrategy
from autopar.shard.batch_norm import split_batch_norm
from autopar.shard.localize import in_evaluation
from autopar.shard.lower import lower
from autopar.shard.program import Call, Program
from autopar.shard.relayout import gradient_layout
from autopar.shard.rules import assignments, inner_collectives, inner_collectives_backward, rule_for
from tests.pool import Pool
from tests.shard.interpreter import Mesh, make_op, run, run_whole
from tests.shard.test_kernels import layer_of
from tests.shard.transformer import spec

BATCH, UNEVEN, CHANNELS = 8, 9, 4
UPDATE, PLAIN = "aten._native_batch_norm_legit_functional.default", "aten.batch_norm.default"


def cases() -> dict[str, LayerClass]:
    """With and without running statistics, weights, and dims beside the channels."""
    images = TensorSpec((Extent(1), Extent(0, CHANNELS), Extent(0, 3), Extent(0, 2)), "float64", True)
    vectors = TensorSpec((Extent(1), Extent(0, CHANNELS)), "float64", True)
    each, kept = spec(CHANNELS), spec(CHANNELS, grad=False)
    results = ("y", "mean", "std", "new_mean", "new_var")
    made = dict.fromkeys(results[1:], kept)
    update = Op(
        "y", UPDATE, make_op("y", UPDATE, "x", "w", "b", "m", "v", True, 0.3, 1e-5).args, (), results, (None,) * 5
    )
    plain = make_op("y", PLAIN, "x", "w", "b", None, None, True, 0.3, 1e-5, False)
    bare = make_op("y", PLAIN, "x", None, None, None, None, True, 0.3, 1e-5, False)
    still = make_op("y", PLAIN, "x", "w", "b", "m", "v", False, 0.3, 1e-5, False)
    return {
        "evaluation": layer_of(still, x=images, w=each, b=each, m=kept, v=kept, y=images),
        "images": layer_of(update, x=images, w=each, b=each, m=kept, v=kept, y=images, **made),
        "vectors": layer_of(update, x=vectors, w=each, b=each, m=kept, v=kept, y=vectors, **made),
        "no statistics": layer_of(plain, x=images, w=each, b=each, y=images),
        "no weight": layer_of(bare, x=images, y=images),
    }


def inputs_of(layer: LayerClass, batch: int) -> dict[str, Tensor]:
    """Random values, far from zero mean; the running variance is positive."""
    generator = torch.Generator().manual_seed(0)
    shapes = {n: layer.values[n].shape_at(batch) for n in layer.inputs}
    found = {n: torch.randn(s, generator=generator, dtype=torch.float64) + 3 for n, s in shapes.items()}
    return {n: t.square() if n == "v" else t for n, t in found.items()}


def evaluate(values: dict[str, Tensor], layer: LayerClass, runner: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results that anybody reads, and inputs as leaves that know their gradients."""
    leaves = {n: t.clone().requires_grad_(layer.values[n].requires_grad) for n, t in values.items()}
    made = runner(leaves)
    results = {n: made[n] for n in layer.ops[0].results}
    weights = torch.cos(torch.arange(UNEVEN, dtype=torch.float64)).view(-1, *[1] * (made["y"].dim() - 1))
    (results["y"].square() * weights[: len(made["y"])]).sum().backward()
    return {n: t.detach() for n, t in results.items()}, leaves


def wrong_cases(sizes: tuple[int, ...], batch: int) -> list[str]:
    """Variants and factors whose results or gradients differ from one device's."""
    mesh, wrong = Mesh(sizes), []
    for name, layer in cases().items():
        whole = inputs_of(layer, batch)
        rule = rule_for(layer.ops[0], layer)
        assert rule is not None
        for factors in assignments(rule, layer.ops[0], layer, sizes, batch):
            wrong += [f"{name} {factors}: {n}" for n in differing(layer, mesh, factors, whole, batch)]
    return wrong


def lowered(layer: LayerClass, sizes: tuple[int, ...], factors: tuple[str, ...]) -> Program:
    """The op between replicated inputs and results."""
    replicated = (REPLICATE,) * len(sizes)
    anything = layer.values["x"]
    return lower(layer, LayerStrategy(replicated, replicated, {"y": factors}, {}), sizes, anything, anything)


def differing(
    layer: LayerClass, mesh: Mesh, factors: tuple[str, ...], whole: dict[str, Tensor], batch: int
) -> list[str]:
    """Names of results and of inputs whose gradients differ."""
    truth, true_leaves = evaluate(whole, layer, lambda v: run_whole(layer, batch, v))
    program = lowered(layer, mesh.sizes, factors)
    places = dict(zip(layer.outputs, program.outputs, strict=True))
    local = {n: mesh.shard(t, program.layouts[n]) for n, t in whole.items()}

    def runner(values: dict[str, Tensor]) -> dict[str, Tensor]:
        made = run(program, mesh, batch, values)
        return {n: made[place] for n, place in places.items()}

    results, leaves = evaluate(local, layer, runner)
    found = {n: mesh.whole(t, program.layouts[places[n]]) for n, t in results.items()}
    wanted = dict(truth)
    for n, leaf in true_leaves.items():
        if leaf.grad is not None:
            wanted[f"gradient of {n}"] = leaf.grad
            gradient = leaves[n].grad
            assert gradient is not None
            found[f"gradient of {n}"] = mesh.whole(gradient, gradient_layout(program.layouts[n]))
    return [n for n in wanted if not torch.allclose(found[n], wanted[n], 1e-11, 1e-11)]


@pytest.mark.parametrize(("sizes", "batch"), [((4,), BATCH), ((2, 2), BATCH), ((4,), UNEVEN), ((2, 2), UNEVEN)])
def test_equals_batch_norm_of_the_whole_batch(pool: Pool, sizes: tuple[int, ...], batch: int) -> None:
    """Results, new running statistics and gradients under every split of samples and channels, in float64."""
    assert pool.run(4, wrong_cases, sizes, batch) == [[]] * 4


def test_what_it_exchanges() -> None:
    """Forward two vectors of this rank's channels, backward one of two numbers a channel, over the axes of samples."""
    layer = cases()["images"]
    program = lowered(layer, (2, 2), ("b", "c"))
    call = next(s for s in program.steps if isinstance(s, Call))
    assert inner_collectives(call, program, BATCH) == (("all_reduce", (0,), (1, CHANNELS // 2), "float64"),) * 2
    assert inner_collectives_backward(call, program, BATCH) == (("all_reduce", (0,), (2, CHANNELS // 2), "float64"),)


def test_outside_training() -> None:
    """Running statistics, if there are any, are used and left as they are."""
    for name, kept in (("images", True), ("no statistics", False)):
        layer = cases()[name]
        call = next(s for s in lowered(layer, (), ()).steps if isinstance(s, Call))
        assert in_evaluation(call).op.args[5] is not kept


def shift_of_samples() -> tuple[float, float]:
    """On a rank: the largest gradient of a shift of all samples of a channel, and the sum of what it is the sum of."""
    generator = torch.Generator().manual_seed(0)
    whole, weights = (torch.randn(UNEVEN, CHANNELS, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    own, own_weights = ((*t.chunk(4), t[:0])[dist.get_rank()] for t in (whole + 3, weights))
    own = own.clone().requires_grad_()
    scale = torch.linspace(0.5, 2.0, CHANNELS, dtype=torch.float64)
    assert dist.group.WORLD is not None
    made = split_batch_norm(own, scale, scale, 1e-5, UNEVEN, dist.group.WORLD.group_name)[0]
    (made.square() * own_weights).sum().backward()
    assert own.grad is not None
    sums = torch.stack((own.grad.sum((0, 2)), own.grad.abs().sum((0, 2))))
    dist.all_reduce(sums)
    return float(sums[0].abs().max()), float(sums[1].min())


def test_a_shift_has_no_gradient(pool: Pool) -> None:
    """What is added to all samples is taken off again: its gradient is zero but for the rounding of one sum."""
    shift, size = pool.run(4, shift_of_samples)[0]
    assert size > 1.0
    assert shift < 8 * torch.finfo(torch.float64).eps * size
