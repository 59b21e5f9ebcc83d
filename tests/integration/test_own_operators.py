"""A model with an operator of the user's own, whose rule the user has registered, on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.shard.table import RULES
from autopar.trace.capture import trace
from autopar.verify import verify
from tests.integration.test_exact import planned
from tests.pool import Pool

NAME, LINE = "autopar_tests::gated_product", "b k, n k, n -> b n"


@torch.library.custom_op(NAME, mutates_args=())
def gated_product(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """A linear map, each of its outputs scaled."""
    return x @ weight.T * gate


@gated_product.register_fake
def _(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return x @ weight.T * gate


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, gate = ctx.saved_tensors
    inner = gradient * gate
    return inner @ weight, inner.T @ x, (gradient * (x @ weight.T)).sum(0)


gated_product.register_autograd(_backward, setup_context=_save)


class Model(nn.Module):
    """Two of the operators with a nonlinearity between, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.empty(32, 16)), nn.Parameter(torch.empty(32))
        self.down, self.rescale = nn.Parameter(torch.empty(16, 32)), nn.Parameter(torch.empty(16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(gated_product(x, self.up, self.scale))
        return nn.functional.cross_entropy(gated_product(hidden, self.down, self.rescale), labels)


def model() -> nn.Module:
    """The same on every process."""
    torch.manual_seed(0)
    made = Model().double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def inputs() -> dict[str, Tensor]:
    """Example inputs."""
    return {"x": torch.zeros(2, 16, dtype=torch.float64), "labels": torch.zeros(2, dtype=torch.long)}


def check(record: PlanRecord, graph: OpGraph) -> dict[str, Any]:
    """On a rank, which registers the rule as a user's script does: verify the plan."""
    autopar.register_rule(NAME, LINE)
    return verify(record, model(), inputs(), graph=graph).to_json()


@pytest.mark.parametrize("config", ["dp=4,zero=1,microbatch_size=2", "tp=4,microbatch_size=8"])
def test_plan_with_a_registered_rule_is_exact(pool: Pool, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, or outputs and the contracted dim, of the operator are split as the rule says; exact to 1e-9.

    The rule also says that samples stay apart, so there may be two microbatches.
    """
    monkeypatch.setitem(RULES, NAME.replace("::", "."), LINE)
    autopar.register_rule(NAME, LINE)
    graph = trace(model(), inputs(), compute_dtype="float64")
    record = planned(graph, config)
    strategies = record.stages[0].strategies
    split = {factor for s in strategies for op, factors in s.ops.items() if "gated" in op for factor in factors}
    assert split
    assert split <= ({"b"} if config.startswith("dp") else {"k", "n"})
    assert (graph.separable, record.num_microbatches) == (True, 2)
    report = pool.run(4, check, record, graph)[0]
    assert report["largest"] < 1e-9, report
