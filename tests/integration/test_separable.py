"""Losses that may be split in time and losses that may not, through `optimize` on two processes, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.errors import AutoparError
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.measure.local import local_cluster
from autopar.plan import POLICIES, PlanRecord, Request
from autopar.trace.capture import trace
from tests.pool import Pool

ROWS, WORLD = 16, 2


class Experts(nn.Module):
    """Each sample is run by its best expert; an auxiliary loss wants experts to be chosen evenly over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), 4).to(x.dtype)
        made = torch.stack([expert(x) for expert in self.experts], dim=1)
        weights = (shares * chosen).unsqueeze(-1)
        return (made * weights).sum(1), 4 * (chosen.mean(0) * shares.mean(0)).sum()


class Model(nn.Module):
    """Two linear maps around a step under test, and a loss under test."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 6)
        self.middle: nn.Module = {"batch norm": nn.BatchNorm1d(8), "experts": Experts()}.get(name, nn.Tanh())
        self.name = name

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.middle(self.first(x))
        if self.name == "experts":
            loss: Tensor = LOSSES[self.name](self.last(hidden[0]), labels) + 0.1 * hidden[1]
            return loss
        return LOSSES[self.name](self.last(hidden), labels)


def contrastive(x: Tensor, _: Tensor) -> Tensor:
    """Every sample against all others."""
    unit = F.normalize(x, dim=-1)
    return -(unit @ unit.t()).log_softmax(-1).diagonal().mean()


def counted(x: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not left out."""
    return F.cross_entropy(x, labels)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean of counted": counted,
    "mean": lambda x, _: x.square().mean(),
    "sum": lambda x, _: x.square().sum(),
    "contrastive": contrastive,
    "batch norm": counted,
    "experts": counted,
}
APART = ("mean of counted", "mean", "sum")
TOGETHER = {"contrastive": "samples", "batch norm": "batch norm", "experts": "reduced"}


def model_of(name: str) -> Model:
    """The model, the same on every process."""
    torch.manual_seed(0)
    return Model(name).double()


def batch() -> dict[str, Tensor]:
    """Labels are left out very unevenly."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 6, (ROWS,), generator=generator)
    labels[2:9] = -100
    return {"x": torch.randn(ROWS, 8, generator=generator, dtype=torch.float64), "labels": labels}


def planned(name: str, config: str | None) -> PlanRecord:
    """A plan for two processes; without a configuration, the best one."""
    cluster = load_cluster(f"{WORLD}xa100-80gb")
    request = Request("test", cluster.name, "cpu", WORLD, ROWS, "fp64", POLICIES["fp64"], "adamw")
    graph = trace(model_of(name), batch(), compute_dtype="float64")
    planner = Planner(graph, cluster, RooflinePricer(cluster), request)
    record = planner.plan(None if config is None else ManualConfig.parse(config))
    here = local_cluster(torch.device("cpu")).device.name
    return replace(record, fingerprint=replace(record.fingerprint, device=here))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The whole gradient of a parameter."""
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor()


def faults(name: str, record: PlanRecord) -> list[str]:
    """On a rank: what a step computes otherwise than the model does on one device."""
    model, whole = model_of(name), batch()
    pm = autopar.optimize(model, whole, plan=record)
    ways, rank = pm.data_parallel_size, pm.data_parallel_rank or 0
    loss = pm.train_step(**{k: v.chunk(ways)[rank] for k, v in whole.items()})
    true_loss = model(**whole)
    true_loss.backward()
    found = {"loss": (loss, true_loss)}
    found |= {n: (gradient_of(pm.get_parameter(n)), p.grad) for n, p in model.named_parameters()}
    found |= {n: (pm.get_buffer(n), b) for n, b in model.named_buffers()}
    return [n for n, (ours, theirs) in found.items() if not torch.allclose(ours, theirs, 1e-9, 1e-12)]


@pytest.mark.parametrize("name", APART)
def test_microbatches_make_up_the_whole_batch(pool: Pool, name: str) -> None:
    """Loss and gradients of four microbatches on two ranks are those of the whole batch on one device."""
    record = planned(name, "dp=2,microbatch_size=2")
    assert record.num_microbatches == 4
    assert pool.run(WORLD, faults, name, record) == [[]] * WORLD


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_meet_are_split_in_space_alone(pool: Pool, name: str) -> None:
    """Several microbatches are refused with the reason; the plan found has one, and two ranks compute it exactly."""
    with pytest.raises(AutoparError, match=TOGETHER[name]):
        planned(name, "dp=2,microbatch_size=2")
    assert planned(name, None).num_microbatches == 1
    assert pool.run(WORLD, faults, name, planned(name, "dp=2,microbatch_size=8")) == [[]] * WORLD
