"""Checkpoints on real processes: between plans bit for bit, in the background, killed half-way, damaged, of others."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from autopar.checkpoints import Checkpoints
from autopar.errors import EmitError
from tests.checkpoints.runs import OPTIMIZERS, assert_equal, case, load_and_save, loaded_plainly, plans_of, run_and_save
from tests.examples import examples
from tests.pool import Pool


def round_trip(pool: Pool, name: str, kind: str, plans: tuple[str, str], folder: Path, background: bool) -> None:
    """What one plan saves is what the model itself loads, and what another plan loads and saves again."""
    first, second = str(folder / "first"), str(folder / "second")
    one, other = (case(name, text, kind) for text in plans)
    saved = pool.run(4, run_and_save, one, first, background)
    there = loaded_plainly(name, kind, first)
    for values in saved:  # each rank's own stages
        assert values
        assert_equal({n: there[n] for n in values}, values)
    assert pool.run(4, load_and_save, other, first, second) == [2] * 4
    assert_equal(loaded_plainly(name, kind, second), there)


@pytest.mark.parametrize(
    ("name", "plans", "background"),
    [
        ("odd gpt", ("1/3 dp=2,zero=3", "dp=2,tp=2,zero=1"), True),  # a tied vocabulary of 67 rows
        ("skips", ("dp=2,tp=2,zero=2", "4/2 dp=2"), False),
    ],
)
def test_between_plans(pool: Pool, name: str, plans: tuple[str, str], background: bool, tmp_path: Path) -> None:
    """Parameters, optimizer states and options go from a pipeline to one stage and back, and into the plain model."""
    round_trip(pool, name, "adamw fused", plans, tmp_path, background)


@pytest.mark.slow
@examples(30, suppress=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_between_any_plans(pool: Pool, data: st.DataObject) -> None:
    """The same for pairs of plans, models and optimizers drawn at random."""
    name = data.draw(st.sampled_from(["odd gpt", "skips", "mlp"]), "model")
    plans = data.draw(st.tuples(*[st.sampled_from(plans_of(name))] * 2), "plans")
    kind, background = data.draw(st.sampled_from([*OPTIMIZERS]), "optimizer"), data.draw(st.booleans(), "background")
    with tempfile.TemporaryDirectory() as folder:
        round_trip(pool, name, kind, plans, Path(folder), background)


def alone() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, OPTIMIZERS["adamw"](model.parameters())


class Killed(FileSystemWriter):
    """Ends its process when a part of the data is written."""

    def write_data(self, *_: Any, **__: Any) -> Any:
        Path(self.path, "half.distcp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_save_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a process dies writing step 2 the newest checkpoint is step 1; saving step 2 again leaves nothing over."""
    model, optimizer = alone()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    child = os.fork()
    if not child:
        monkeypatch.setattr(state_dict_saver, "_storage_setup", lambda _, folder, **__: Killed(folder))
        checkpoints.save(2, model, optimizer)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / ".unfinished-step-2" / "half.distcp").exists()
    again = Checkpoints(tmp_path)
    assert again.load(model, optimizer) == 1
    again.save(2, model, optimizer)
    assert again.steps() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_what_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    """A file changed or cut off, another model and another optimizer are told apart, and no value is changed."""
    model, optimizer = alone()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(model, optimizer) is None
    checkpoints.save(1, model, optimizer)
    with pytest.raises(EmitError, match="weight has shape"):
        checkpoints.load(nn.Linear(4, 2))
    with pytest.raises(EmitError, match=r"model\.0\.weight is not in it"):
        checkpoints.load(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(EmitError, match=r"SGD has the options .*momentum"):
        checkpoints.load(model, OPTIMIZERS["momentum"](model.parameters()))
    with pytest.raises(EmitError, match="parameter of shape"):
        checkpoints.load(model, OPTIMIZERS["adamw"](nn.Linear(3, 2).parameters()))
    (data,) = (tmp_path / "step-1").glob("*.distcp")
    other, its = alone()
    before, good = {n: t.clone() for n, t in other.state_dict().items()}, data.read_bytes()
    weight = model.state_dict()["weight"].numpy().tobytes()
    assert good.count(weight) == 1
    data.write_bytes(good.replace(weight, weight[:-1] + bytes([weight[-1] ^ 1])))
    with pytest.raises(EmitError, match=f"{data.name} has changed"):
        checkpoints.load(other, its)
    data.write_bytes(good[:-10])
    with pytest.raises(EmitError, match="cut off"):
        checkpoints.load(other, its)
    (tmp_path / "step-1" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(EmitError, match="can't be read"):
        checkpoints.load(other, its)
    assert_equal(dict(other.state_dict()), before)
    assert not its.state


def test_an_optimizer_that_took_no_step(tmp_path: Path) -> None:
    """Nothing is made up for it: it is loaded without states, and its schedule goes on where it was."""
    model, optimizer = alone()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    checkpoints = Checkpoints(tmp_path, keep=1)
    for number in range(3):
        checkpoints.save(number, model, optimizer, schedule=schedule)
        schedule.step()
    assert checkpoints.steps() == [2]
    other, its = alone()
    again = torch.optim.lr_scheduler.LinearLR(its, 0.1, total_iters=4)
    assert checkpoints.load(other, its, schedule=again) == 2
    assert not its.state
    assert again.last_epoch == 2
    again.step()
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_replacement_that_was_killed(tmp_path: Path) -> None:
    """A checkpoint that was moved away for a new one of the same step, which never came, is put back."""
    model, optimizer = alone()
    Checkpoints(tmp_path).save(1, model, optimizer)
    (tmp_path / "step-1").rename(tmp_path / ".replaced-step-1")
    assert Checkpoints(tmp_path).load(model, optimizer) == 1


def test_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    """What is saved after going back is kept, whatever later steps lie there; those before it are counted from it."""
    model, optimizer = alone()
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 8, 9):
        checkpoints.save(step, model, optimizer)
    assert checkpoints.steps() == [8, 9]
    assert checkpoints.load(model, optimizer, step=8) == 8
    for step in (2, 3, 4):
        checkpoints.save(step, model, optimizer)
    assert checkpoints.steps() == [3, 4, 8, 9]


def test_a_removal_that_was_killed(tmp_path: Path) -> None:
    """What was left of a replaced checkpoint doesn't stand in the way of saving that step again."""
    model, optimizer = alone()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    (tmp_path / ".replaced-step-1").mkdir()
    (tmp_path / ".replaced-step-1" / "left").write_bytes(b"over")
    checkpoints.save(1, model, optimizer)
    assert os.listdir(tmp_path) == ["step-1"]
