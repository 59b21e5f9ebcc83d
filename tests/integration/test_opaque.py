"""Submodules that run as one operator: in stages, recomputed, and with random numbers inside."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.emit.build import emit
from autopar.emit.parameters import local
from autopar.emit.source.write import write_source
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from autopar.verify import verify
from tests.integration.test_exact import planned
from tests.integration.unusual import WIDTH, Experts, Mixer
from tests.pool import Pool


class Noisy(nn.Module):
    """Adds noise that no input gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + 0.1 * torch.randn_like(y)


class Dropping(nn.Module):
    """A recurrent layer that drops out between its layers: one operator that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(x)[0]
        return out


class Stack(nn.Module):
    """Blocks of a mixer and a submodule of some kind."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Mixer(), kind()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


@cache
def example(name: str) -> tuple[nn.Module, dict[str, Any], OpGraph]:
    """A model in float64, example inputs and its trace: the same on every process."""
    torch.manual_seed(0)
    model = Stack({"experts": Experts, "noisy": Noisy, "dropping": Dropping}[name]).double()
    inputs = {"x": torch.zeros(2, 4, WIDTH, dtype=torch.float64)}
    return model, inputs, trace(model, inputs, compute_dtype="float64")


def check(name: str, text: str) -> dict[str, Any]:
    """On a rank: verify a written plan."""
    model, inputs, graph = example(name)
    return verify(planned(graph, text), model, inputs, graph=graph).to_json()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("experts", "pp=2,dp=2,microbatch_size=2,recompute=full", marks=pytest.mark.slow),
        ("noisy", "dp=4,zero=3,microbatch_size=4,recompute=full"),
        pytest.param("dropping", "dp=2,tp=2,microbatch_size=8", marks=pytest.mark.slow),
    ],
)
def test_plan_is_exact(pool: Pool, name: str, config: str) -> None:
    """Loss, gradients and parameters are those of one device; noise is what autopar's own plan for one draws."""
    report = pool.run(4, check, name, config)[0]
    assert report["largest"] < 1e-9, report


def losses() -> list[float]:
    """Of two steps on the same rows and parameters."""
    model, inputs, graph = example("noisy")
    pm = emit(planned(graph, "dp=4,microbatch_size=4"), graph, model, device="cpu")
    rows = {name: t.new_ones(4, *t.shape[1:]) for name, t in inputs.items()}
    return [float(pm.train_step(**rows)) for _ in range(2)]


def test_each_step_draws_anew(pool: Pool) -> None:
    """All ranks have one loss, and the next step another: the numbers drawn are not the same again."""
    ranks = pool.run(4, losses)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] != ranks[0][1]


def outcome(name: str, record: PlanRecord, folder: str) -> list[list[Tensor]]:
    """Losses in training and evaluation and this rank's gradients: by the plan's own code, then by files."""
    model, inputs, graph = example(name)
    found = []
    for source in (None, Path(folder)):
        pm = emit(record, graph, model, device="cpu", source=source)
        numbers = torch.Generator().manual_seed(3)
        x = torch.randn(16, *inputs["x"].shape[1:], generator=numbers, dtype=torch.float64)
        rows = pm.data_parallel_rows() or range(0)
        losses = [run(x=x[rows.start : rows.stop]).detach() for run in (pm.train_step, pm.eval_step)]
        found.append([*losses, *(local(p.grad) for p in pm.parameters() if p.grad is not None)])
    return found


@pytest.mark.parametrize(
    "config",
    [
        "dp=4,zero=3,microbatch_size=4,recompute=full",
        pytest.param("pp=2,dp=2,microbatch_size=2", marks=pytest.mark.slow),
    ],
)
def test_source_calls_them(pool: Pool, config: str, tmp_path: Path) -> None:
    """Files name the submodule and call it as it is: the same numbers bit for bit, in training and outside."""
    graph = example("experts")[2]
    record = planned(graph, config)
    (first, *_) = write_source(record, graph, tmp_path)
    assert "= Submodule('blocks.0.1" in first.read_text()
    for own, written in pool.run(4, outcome, "experts", record, str(tmp_path)):
        assert len(own) > 4
        assert all(a.equal(b) for a, b in zip(own, written, strict=True))
