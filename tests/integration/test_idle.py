"""Plans that use fewer devices than the job has, through the API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster import Cluster
from autopar.errors import ConfigError, EmitError
from autopar.measure.local import local_cluster
from tests.integration.models import Mlp
from tests.pool import Pool

BATCH = 8


def here(ranks: int) -> Cluster:
    """This machine with so many ranks, priced by its datasheet."""
    return replace(local_cluster(torch.device("cpu"), ranks), name="here")


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 16, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 8, (BATCH,), generator=generator)}


def model() -> Mlp:
    torch.manual_seed(0)
    return Mlp().double()


def asked(how: str) -> dict[str, Any]:
    config = autopar.ManualConfig(devices=2, dp=2, microbatch_size=2)
    return {"config": config} if how == "config" else {"constraints": ["devices=2", "dp=2"]}


def train(how: str) -> tuple[int | None, list[float], str, int]:
    """A step on four ranks of which two are used: what each rank sees."""
    batch = inputs()
    pm = autopar.optimize(model(), batch, cluster=here(4), global_batch=BATCH, dtype="fp64", **asked(how))
    rank, refused = pm.data_parallel_rank, ""
    mine = {} if rank is None else {k: t.chunk(pm.data_parallel_size)[rank] for k, t in batch.items()}
    losses = [pm.train_step(**mine).item(), pm.eval_step(**mine).item()]
    if rank is None:
        assert pm.clip_grad_norm_(1.0) == 0
        with pytest.raises(EmitError, match="idle") as found:
            pm(**batch)
        refused = str(found.value)
    return rank, losses, refused, len(list(pm.parameters()))


@pytest.mark.parametrize("how", ["config", "constraint"])
def test_two_of_four_ranks(pool: Pool, how: str) -> None:
    """Two ranks train, two are idle: these give no inputs, hold no parameters and get the loss of the whole batch."""
    found = pool.run(4, train, how)
    loss = model()(**inputs()).item()
    assert [rank for rank, *_ in found] == [0, 1, None, None]
    assert all(losses == pytest.approx([loss, loss], rel=1e-12) for _, losses, *_ in found)
    assert [bool(refused) for _, _, refused, _ in found] == [False, False, True, True]
    assert [count for *_, count in found] == [6, 6, 0, 0]


@pytest.mark.parametrize("how", ["config", "constraint"])
def test_the_plan_says_what_is_idle(how: str) -> None:
    """The request counts the job's devices, the stages those used."""
    plan = autopar.plan(model(), inputs(), cluster=here(4), global_batch=BATCH, dtype="fp64", **asked(how))
    assert plan.request.devices == 4
    assert plan.stages[0].devices == (0, 1)
    assert "2 idle" in plan.explain()


def test_more_devices_than_there_are() -> None:
    """A constraint on the number of devices can't ask for more than the cluster has."""
    with pytest.raises(ConfigError, match="devices=8"):
        autopar.plan(model(), inputs(), cluster=here(4), global_batch=BATCH, dtype="fp64", constraints=["devices=8"])
