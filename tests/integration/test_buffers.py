"""Buffers that forward changes: running statistics are those of the whole global batch, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.emit.build import emit
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from tests.integration.models import example, traced
from tests.integration.test_exact import GLOBAL_BATCH, planned
from tests.pool import Pool


class Block(nn.Module):
    """Batch norm inside a block; its running statistics differ from those of other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Blocks(nn.Module):
    """Equal blocks, which are traced once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def blocks() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64, and a batch."""
    torch.manual_seed(0)
    return Blocks().double(), {"x": torch.randn(GLOBAL_BATCH, 8, dtype=torch.float64)}


def conv_net() -> tuple[nn.Module, dict[str, Tensor]]:
    """The convolutional net, and a batch."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(GLOBAL_BATCH, 4, 8, 8, generator=generator, dtype=torch.float64)
    return example("cnn")[0], {"image": image, "labels": torch.arange(GLOBAL_BATCH) % 8}


MAKERS = {"blocks": blocks, "cnn": conv_net}


def faults(name: str, record: PlanRecord, graph: OpGraph) -> list[str]:
    """On a rank: what differs of buffers after two steps and an evaluation, in `state_dict`, and of its loss."""
    model, batch = MAKERS[name]()
    model = copy.deepcopy(model)
    pm = emit(record, graph, model, device="cpu")
    ways, rank = pm.data_parallel_size, pm.data_parallel_rank or 0
    rows = {k: v.chunk(ways)[rank] for k, v in batch.items()}
    for _ in range(2):
        pm.train_step(**rows)
        model(**batch).backward()
    trained = {n: b.clone() for n, b in model.named_buffers()}
    found = {"evaluation": (pm.eval_step(**rows), model.eval()(**batch).detach())}
    state = pm.state_dict()
    found |= {n: (state[n], b) for n, b in trained.items()}
    return [n for n, (ours, theirs) in found.items() if not torch.allclose(ours, theirs, 1e-11, 1e-13)]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("config", ["dp=4,zero=3", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MAKERS)
def test_buffers_are_those_of_the_model(pool: Pool, name: str, config: str, recompute: str) -> None:
    """After two steps, recomputed or not, and so is the loss in evaluation, which leaves them as they are."""
    model, batch = MAKERS[name]()
    graph = traced("cnn") if name == "cnn" else trace(model, batch, compute_dtype="float64")
    size = GLOBAL_BATCH // (4 if config.startswith("dp=4") else 2)
    record = planned(graph, f"{config},microbatch_size={size},recompute={recompute}")
    assert pool.run(4, faults, name, record, graph) == [[]] * 4
