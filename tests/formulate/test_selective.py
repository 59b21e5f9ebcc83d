"""Selective recomputation in plans: the bytes of the published formula, and where it is offered."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.formulate.layers.recompute import offered
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import LayerCost, PlanRecord
from autopar.trace import trace
from tests.formulate.cases import planner, traced
from tests.integration.test_exact import planned

LENGTH, WIDTH, HEADS, BLOCKS, BATCH = 1024, 2048, 16, 3, 16


class Block(nn.Module):
    """A block as the formula's paper has it: norms first, attention written out, dropout in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) * (WIDTH / HEADS) ** -0.5 + mask
        mixed = (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        change: Tensor = self.drop(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))
        return x + change


class Model(nn.Module):
    """Blocks over an embedding, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = torch.full((LENGTH, LENGTH), float("-inf"), device=ids.device, dtype=self.head.weight.dtype).triu(1)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def graph_of(dtype: str = "bfloat16") -> OpGraph:
    """The trace of the model."""
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    with torch.device("meta"):
        return trace(Model(), {"ids": ids, "labels": ids}, compute_dtype=dtype)


def block_of(record: PlanRecord) -> LayerCost:
    """Costs of the last block: the first pays for the mask that all read."""
    return next(cost for cost in reversed(record.costs.layers) if cost.run == record.costs.layers[-1].run - 1)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("config", "ways"), [("dp=1", 1), ("tp=2", 2), ("tp=2,sp=1", 2)])
def test_bytes_of_a_block_are_those_of_the_formula(config: str, ways: int, recompute: str) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)) bytes, and (34 + 5 a s / h) / t with sequence parallelism (Korthikanti et
    al., 2022, table 2); selective recomputation leaves the last term out. Two differences: the paper leaves out, as
    small, the mean and deviation of each row that both norms keep, 2 x 2 x 4 bytes a token; and with sequence
    parallelism it gathers what the first linear layers read once more in the backward pass, where autopar keeps it
    gathered: 2 x 2 bytes that are not split."""
    rows = BATCH * LENGTH
    per_row = WIDTH * (10 + 24 / ways) + 16
    if "sp" in config:
        per_row = (WIDTH * 30 + 16) / ways + WIDTH * 4
    core = 5 * HEADS * LENGTH / ways if recompute == "none" else 0
    record = planned(graph_of(), f"{config},microbatch_size={BATCH},recompute={recompute}", "bf16", ways)
    assert block_of(record).memory["saved"] == rows * (per_row + core)


def test_time_is_that_of_the_core_forward_once_more() -> None:
    """Full recomputation takes more than selective, none takes none; only what runs again is added."""
    found = {
        kind: block_of(planned(graph_of(), f"dp=1,microbatch_size={BATCH},recompute={kind}", "bf16", 1)).pass_s
        for kind in ("none", "selective", "full")
    }
    again = [found[kind]["recompute"] for kind in ("none", "selective", "full")]
    assert 0 == again[0] < again[1] < again[2] < found["none"]["forward"]
    assert all(passes["forward"] == found["none"]["forward"] for passes in found.values())
    assert all(passes["backward"] == found["none"]["backward"] for passes in found.values())


def test_offered_where_it_saves_bytes() -> None:
    """Only to blocks with attention written out; asked for where there is no attention, it is none."""
    graph, kinds = graph_of(), ("none", "selective", "full")
    found = [offered(graph.classes[layer.class_index], kinds) for layer in graph.layers]
    assert found == [("none", "full"), *[kinds] * BLOCKS, ("none", "full")]
    assert {offered(c, ("selective",)) for c in traced("mlp").classes} == {("none",)}


def test_the_search_recomputes_parts_where_memory_is_short() -> None:
    """Between what fits without recomputation and what doesn't, blocks run parts again (their core, or what is cheap),
    and it is faster than recomputing whole layers only."""
    free = limited(None, ())
    limit = round(free.peak_tensor_bytes * 0.75)
    plan, without = limited(limit, ()), limited(limit, ("recompute=full",))
    assert {"selective", "light"} & {s.recompute for s in plan.stages[0].strategies}
    assert plan.peak_tensor_bytes <= limit
    assert plan.step_time_s < without.step_time_s


def limited(limit_bytes: int | None, constraints: tuple[str, ...]) -> PlanRecord:
    """The plan on one device with all samples at once."""
    maker = planner("mlp", "1xa100-80gb", 64, limit_bytes, ("microbatch_size=64", *constraints))
    return Planner(graph_of(), maker.cluster, maker.pricer, maker.request).plan()


def test_blocks_may_differ() -> None:
    """`layers=` gives ranges of blocks a kind of recomputation of their own."""
    text = f"dp=1,microbatch_size={BATCH},recompute=selective,layers=0:recompute=full;2:recompute=none"
    stage = planned(graph_of(), text, "bf16", 1).stages[0]
    assert [stage.strategies[i].recompute for i in stage.assignment] == ["none", "full", "selective", "none", "none"]
