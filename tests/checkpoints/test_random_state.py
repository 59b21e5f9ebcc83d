"""Dropout goes on where it was when a run resumes under another plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.checkpoints import Checkpoints
from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.emit.build import emit
from autopar.emit.module import ParallelModule
from autopar.emit.rows import slice_rows
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.graph import OpGraph
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.trace import trace
from tests.pool import Pool

RANKS, BATCH, WIDTH = 4, 8, 8


class Experts(nn.Module):
    """Four experts with dropout inside, their results weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.dropout(torch.einsum("btd,edf->betf", x, self.up).relu(), 0.5, self.training)
        made = torch.einsum("betf,efd->betd", inside, self.down)
        return torch.einsum("betd,bte->btd", made, self.gate(x).softmax(-1)).pow(2).mean()


def example() -> tuple[nn.Module, Tensor]:
    """The model and a batch: the same on every process."""
    torch.manual_seed(0)
    return Experts().double(), torch.randn(BATCH, 4, WIDTH, dtype=torch.float64)


def planned(graph: OpGraph, text: str) -> PlanRecord:
    """The plan of `text`."""
    cluster = load_cluster(f"{RANKS}xa100-80gb")
    request = Request("experts", cluster.name, "cpu", RANKS, BATCH, "fp64", POLICIES["fp64"], "sgd")
    return Planner(graph, cluster, RooflinePricer(cluster), request).plan(ManualConfig.parse(text))


def losses(record: PlanRecord, graph: OpGraph, folder: str, resumed: bool) -> list[float]:
    """Losses of three steps with a save behind the second, or that of the third one after loading."""
    model, x = example()
    pm = emit(record, graph, model, device="cpu")
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder)
    found = []
    if resumed:
        assert checkpoints.load(pm, optimizer) == 2
    else:
        found = [_step(pm, optimizer, graph, x) for _ in range(2)]
        checkpoints.save(2, pm, optimizer)
    found.append(_step(pm, optimizer, graph, x))
    return found


def _step(pm: ParallelModule, optimizer: torch.optim.Optimizer, graph: OpGraph, x: Tensor) -> float:
    rows = pm.data_parallel_rows()
    assert rows is not None
    loss = pm.train_step(**slice_rows({"x": x}, graph, rows))
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("text", ["tp=4", "dp=2,tp=2"])
def test_dropout_goes_on_under_another_plan(pool: Pool, text: str, tmp_path: Path) -> None:
    """A run of data replicas that goes on with its experts split has the losses of one that was never interrupted."""
    graph = trace(*example(), compute_dtype="float64")
    whole = pool.run(RANKS, losses, planned(graph, "dp=4"), graph, str(tmp_path), False)[0]
    resumed = pool.run(RANKS, losses, planned(graph, text), graph, str(tmp_path), True)[0]
    assert resumed == pytest.approx(whole[2:], rel=1e-12)
    assert whole[0] != pytest.approx(whole[2], rel=1e-3)
