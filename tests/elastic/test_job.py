"""Jobs on real processes that change plans while they run, beside jobs that don't."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.elastic import Elastic
from autopar.elastic.migrate import migrate
from autopar.emit.example import random_batch
from autopar.emit.module import ParallelModule
from autopar.emit.rows import slice_rows
from autopar.errors import ConfigError
from autopar.plan import PlanRecord
from tests.checkpoints.runs import BATCH, Case, assert_equal, case, made, whole
from tests.integration.models import example
from tests.pool import Pool

RANKS, SLOW, PATIENCE, SLOW_FROM = 4, 2, 3, 4
CLUSTER = "4xa100-80gb"


@dataclass
class Clock:
    """Seconds that pass when they are said to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def rows(pm: ParallelModule, case: Case, seed: int) -> dict[str, Any]:
    """This rank's rows of a random global batch; none on an idle rank."""
    graph, mine = case.graph, pm.data_parallel_rows()
    examples = [example(case.name)[1][n] for n in graph.inputs]
    batch = dict(zip(graph.inputs, random_batch(graph, examples, BATCH, seed, torch.device("cpu")), strict=True))
    return {} if mine is None else slice_rows(batch, graph, mine)


@dataclass(frozen=True)
class Ran:
    """Losses and learning rates of a run, the steps after which plans changed, and the last plan's layers by rank."""

    losses: list[float]
    rates: list[float]
    changes: list[int]
    layers: dict[int, int]
    drawn: float


def run(case: Case, steps: int, change_steps: float, watched: bool) -> Ran:
    """Train with a schedule; from step `SLOW_FROM` on rank `SLOW` takes three times as long, and all wait for it."""
    pm, optimizer = made(case)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps)
    clock = Clock()
    rank = torch.distributed.get_rank()
    usual_s = pm.record.step_time_s
    elastic = Elastic(
        example(case.name)[0], pm, optimizer, steps=steps, cluster=CLUSTER, patience=PATIENCE,
        change_s=change_steps * usual_s,
        clock=clock, timed=lambda *_: 3.0 if rank == SLOW else 1.0,
    )  # fmt: skip
    losses, rates, changes = list[float](), list[float](), list[int]()
    torch.manual_seed(5)
    for step in range(1, steps + 1):
        losses.append(pm.train_step(**rows(pm, case, step)).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rates.append(float(schedule.get_last_lr()[0]))
        clock.now_s += usual_s * (3 if step >= SLOW_FROM and not changes else 1)
        if watched and elastic.step():
            changes.append(step)
            usual_s = pm.record.step_time_s
    layers = {r: sum(len(s.assignment) for s in pm.record.stages if r in s.devices) for r in range(RANKS)}
    return Ran(losses, rates, changes, layers, torch.rand(()).item())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt", "pp=2,dp=2,zero=3"),
        pytest.param("gpt", "dp=2,tp=2,zero=1", marks=pytest.mark.slow),
        pytest.param("llama", "dp=4,zero=2", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_planned_around(pool: Pool, name: str, text: str) -> None:
    """Within k + 1 steps of three times the usual time there is another plan; losses, rates and random numbers are
    those of a run that nobody watched."""
    asked = case(name, text, "adamw foreach")
    alone = pool.run(RANKS, run, asked, 10, 0.1, False)
    watched = pool.run(RANKS, run, asked, 10, 0.1, True)
    for one, other in zip(alone, watched, strict=True):
        assert one.changes == []
        assert other.changes == [SLOW_FROM + PATIENCE - 1]
        assert other.losses == pytest.approx(one.losses, rel=1e-9)
        assert (other.rates, other.drawn) == (one.rates, one.drawn)
        assert other.layers[SLOW] < max(other.layers.values())


def test_no_change_for_the_last_steps(pool: Pool) -> None:
    """Where a change takes longer than what is left can save, what runs goes on."""
    ran = pool.run(RANKS, run, case("gpt", "dp=4", "sgd"), 8, 5.0, True)
    assert [one.changes for one in ran] == [[]] * RANKS


def moved(case: Case, record: PlanRecord, folder: str) -> bool:
    """Values before and after a change of plans that starts with two parameter groups, whole."""
    pm, _ = made(case)
    named = dict(pm.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if "weight" not in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for seed in range(2):
        pm.train_step(**rows(pm, case, seed))
        optimizer.step()
        optimizer.zero_grad()
    before = _values(pm, optimizer)
    same = pm
    migrate(pm, optimizer, example(case.name)[0], record, Path(folder))
    assert pm is same
    assert pm.record == record
    assert pm.steps == 2
    after = _values(pm, optimizer)
    everywhere: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(everywhere, (before, after))
    assert_equal(
        {k: v for _, b in everywhere for k, v in b.items()}, {k: v for a, _ in everywhere for k, v in a.items()}
    )
    return True


def _values(pm: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that is kept of the parameters on this rank: themselves, their states, the decay of their group."""
    found: dict[str, Any] = {n: whole(t) for n, t in pm.state_dict().items()}
    for group in optimizer.param_groups:
        for name, parameter in pm.named_parameters():
            if any(parameter is p for p in group["params"]):
                found[f"{name} decay"] = group["weight_decay"]
    for name, parameter in pm.named_parameters():
        found |= {f"{name} {k}": whole(v) for k, v in optimizer.state[parameter].items()}
    return found


def test_values_move_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """From a pipeline to one stage: parameters, moments and groups are the same afterwards, in the same objects."""
    one, other = case("odd gpt", "1/3 dp=2,zero=3"), case("odd gpt", "dp=2,tp=2,zero=1")
    assert pool.run(RANKS, moved, one, other.plan, str(tmp_path)) == [True] * RANKS


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of another size, no folder between machines and no patience are said."""
    from autopar.emit.build import emit_alone

    asked = case("mlp", "dp=4")
    pm = emit_alone(asked.plan, asked.graph, example("mlp")[0], device="cpu")
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)

    def make(**named: Any) -> Elastic:
        asked: dict[str, Any] = {"steps": 1, "cluster": "1xa100-80gb"}
        return Elastic(example("mlp")[0], pm, optimizer, **(asked | named))

    with pytest.raises(ConfigError, match="has 4 devices, the job 1 ranks"):
        make(cluster=CLUSTER)
    with pytest.raises(ConfigError, match="patience=0"):
        make(patience=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="on several machines"):
        make()
