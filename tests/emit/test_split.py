"""Products whose weights' gradients are made later, against torch's own, and the steps of schedules that do so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autopar.emit import split
from autopar.emit.split import SplitProduct, WeightGradients
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.shard.put_off import Roles
from tests.emit.test_pipeline import counted
from tests.integration.models import traced
from tests.integration.staged import staged
from tests.pool import Pool

ATEN = torch.ops.aten
PRODUCTS = {
    "linear": (ATEN.linear.default, Roles(0, 1, 2, True), ((2, 3, 4), (5, 4), (5,))),
    "linear without bias": (ATEN.linear.default, Roles(0, 1, -1, True), ((2, 3, 4), (5, 4))),
    "addmm": (ATEN.addmm.default, Roles(1, 2, 0, False), ((5,), (3, 4), (4, 5))),
    "mm": (ATEN.mm.default, Roles(0, 1, -1, False), ((3, 4), (4, 5))),
    "matmul": (ATEN.matmul.default, Roles(0, 1, -1, False), ((2, 3, 4), (4, 5))),
}


def gradients(product: Callable[..., Tensor], operands: list[Tensor], finish: Callable[[], None]) -> list[Tensor]:
    """Gradients of two passes added up."""
    for scale in (1.0, 2.0):
        made = checkpoint(lambda *given: product(*given).sin(), *operands, use_reentrant=False)
        (scale * made).sum().backward()
    finish()
    return [operand.grad for operand in operands if operand.grad is not None]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("late", [False, True])
def test_products_make_torchs_gradients(name: str, late: bool) -> None:
    """At once or later, two passes that are run again add up to the gradients of the plain operator."""
    operation, roles, shapes = PRODUCTS[name]
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    plain, ours = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    waiting = WeightGradients()
    waiting.on = late
    product = SplitProduct(operation, roles, waiting)

    def finish() -> None:
        assert (ours[roles.weight].grad is None) == late
        waiting.take()()

    found, wanted = gradients(product, ours, finish), gradients(operation, plain, lambda: None)
    assert len(found) == len(wanted) == len(shapes)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def put_off(record: PlanRecord, graph: OpGraph, name: str) -> int:
    """On a rank: check losses, gradients, evaluation and clipping; how many gradients were put off."""
    plain, count = split.WeightGradients.of, 0

    def counting(self: WeightGradients, leaf: Tensor, make: split.Make) -> Tensor | None:
        nonlocal count
        made = plain(self, leaf, make)
        count += made is None
        return made

    split.WeightGradients.of = counting  # type: ignore[method-assign]
    try:
        counted(record, graph, name)
    finally:
        split.WeightGradients.of = plain  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize(
    ("schedule", "text", "counts"),
    [
        ("zb", "dp=2,zero=3", (3, 3)),
        ("zbv", "dp=2,zero=3,recompute=full", (2, 1, 1, 2)),
        ("dualpipev", "dp=2", (2, 1, 1, 2)),
    ],
)
def test_split_steps_accumulate_and_weigh_what_counts(
    pool: Pool, schedule: str, text: str, counts: tuple[int, ...]
) -> None:
    """Loss, evaluation, gradients of two steps and their norm are the model's; gradients were put off on every rank."""
    graph = traced("skips")
    found = pool.run(4, put_off, staged(graph, (text, text), counts, schedule, 4, 2), graph, "skips")
    assert all(found)
