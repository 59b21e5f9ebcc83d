"""A folder of checkpoints, of which the newest whole one outlives whatever happens to a save."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from autopar.checkpoints.reading import read
from autopar.checkpoints.states import mismatches, optimizer_entries, optimizer_places, put_optimizer
from autopar.errors import ConfigError, EmitError

UNFINISHED, REPLACED = ".unfinished-", ".replaced-"
OWN = ("model", "optimizer", "steps", "loss_scale")


class Checkpoints:
    """The checkpoints `step-N` in `folder`: a save leaves its own and the `keep` - 1 before it.

    Later ones, from before a job went back to an earlier step, stay until they are saved anew or removed by hand.
    Making it, `save`, `load` and `wait` are collective over the job; its ranks see one file system. A checkpoint is
    written beside its place and renamed when all of it is there, so a save that is killed leaves those before it as
    they were. Whatever plan it was saved under, it loads under any other and into the plain model, bit for bit.
    `model` is a ParallelModule or the model itself, `more` are further things with `state_dict` and `load_state_dict`
    (schedulers, data loaders) that are the same on all ranks.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: give how many checkpoints are kept, 1 or more")
        self.folder, self.keep = Path(folder), keep
        # A group of its own: what is saved in the background must not mix with what training sends.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._running: Future[None] | None = None
        if self._first:
            self._mend()

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, the newest last."""
        names = [p.parent.name.removeprefix("step-") for p in self.folder.glob("step-*/.metadata")]
        return sorted(int(name) for name in names if name.isdecimal())

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        asynchronous: bool = False,
        **more: Any,
    ) -> None:
        """Save as the checkpoint of `step`.

        With `asynchronous` the values are copied and written in the background; the next save, or `wait`, waits for it.
        """
        self._check_names(more)
        self.wait()
        state = {"model": dict(model.state_dict()), "steps": getattr(model, "steps", step), **more}
        state |= {"optimizer": optimizer_entries(model, optimizer)} if optimizer is not None else {}
        state |= {"loss_scale": scale} if (scale := getattr(model, "loss_scale", None)) is not None else {}
        unfinished = self._path(step, UNFINISHED)
        self._together(self._make_room, unfinished)
        if asynchronous and self._group is not None:
            saving: Any = async_save(state, checkpoint_id=unfinished, process_group=self._group)
            running = self._running = Future[None]()
            saving.add_done_callback(lambda saved: self._finish_running(saved, step, running))
            return
        save(state, checkpoint_id=unfinished, process_group=self._group, no_dist=self._group is None)
        self._together(self._finish, step)

    def wait(self) -> None:
        """Return when nothing is being saved any more. Raises what went wrong in the background."""
        running, self._running = self._running, None
        if running is not None:
            self._together(running.result)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int | None = None, **more: Any
    ) -> int | None:
        """Load the checkpoint of `step`, by default the newest; returns its step, None where there is none yet.

        Nothing is changed, and EmitError raised, where it is damaged or holds another model's or optimizer's values.
        The optimizer's options (learning rate and so on) become those that were saved.
        """
        self._check_names(more)
        self.wait()
        steps = self.steps()
        step = self._agreed(step if step is not None else steps[-1] if steps else None)
        if step is None:
            return None
        path = self._path(step)
        state: dict[str, Any] = {"model": dict(model.state_dict()), "steps": 0, **more}
        self._together(self._fit, path, state, model, optimizer)
        try:
            load(state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            raise EmitError(f"{path}: can't be loaded: {error}. Load another, with step=.") from error
        if optimizer is not None:
            put_optimizer(model, optimizer, state["optimizer"])
        if hasattr(model, "steps"):
            model.steps = state["steps"]
        return step

    # --- how --------------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> bool:
        return self._group is None or dist.get_rank() == 0

    def _path(self, step: int, prefix: str = "") -> Path:
        return self.folder / f"{prefix}step-{step}"

    def _check_names(self, more: dict[str, Any]) -> None:
        if taken := sorted({*more} & {*OWN}):
            raise ConfigError(f"{', '.join(taken)}: names that checkpoints use themselves; give others")

    def _mend(self) -> None:
        """Put back checkpoints whose replacement was killed between two renames; finish removing those after."""
        for replaced in self.folder.glob(f"{REPLACED}step-*"):
            place = self.folder / replaced.name.removeprefix(REPLACED)
            if place.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(place)

    def _make_room(self, unfinished: Path) -> None:
        if self._first:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _finish_running(self, saved: Future[Any], step: int, running: Future[None]) -> None:
        """In the background: finish, then let `wait` go on."""
        try:
            saved.result()
            self._finish(step)
        except BaseException as error:
            running.set_exception(error)
        else:
            running.set_result(None)

    def _finish(self, step: int) -> None:
        """Put the checkpoint of `step`, which is whole, in its place, and remove old ones."""
        if not self._first:
            return
        place, replaced = self._path(step), self._path(step, REPLACED)
        if place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            place.rename(replaced)
        self._path(step, UNFINISHED).rename(place)
        shutil.rmtree(replaced, ignore_errors=True)
        before = [s for s in self.steps() if s < step]
        for old in before[::-1][self.keep - 1 :]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def _agreed(self, step: int | None) -> int | None:
        """Rank 0's `step`."""
        told = [step]
        if self._group is not None:
            dist.broadcast_object_list(told, 0, group=self._group)
        return told[0]

    def _together(self, work: Any, *arguments: Any) -> None:
        """Do `work` on every rank; where it fails on any, raise that on all, as others would wait for it."""
        failed: Exception | None = None
        try:
            work(*arguments)
        except Exception as error:
            failed = error
        if self._group is not None:
            told = failed if failed is None or isinstance(failed, EmitError) else EmitError(f"{failed!r} on a rank")
            every: list[EmitError | None] = [None] * self._group.size()
            dist.all_gather_object(every, told, group=self._group)
            failed = failed or next((one for one in every if one is not None), None)
        if failed is not None:
            raise failed

    def _fit(
        self, path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Raise EmitError unless the checkpoint is whole and fits; adds what the optimizer is loaded into."""
        stored = read(path) if self._group is None else read(path, self._group.rank(), self._group.size())
        if optimizer is not None:
            own = {k.removeprefix("optimizer."): v for k, v in stored.items() if k.startswith("optimizer.")}
            state["optimizer"] = optimizer_places(model, optimizer, own)
        scale = getattr(model, "loss_scale", None)
        state |= {"loss_scale": scale} if scale is not None and "loss_scale.value" in stored else {}
        wrong = mismatches({f"model.{n}": t for n, t in state["model"].items()}, stored)
        if wrong:
            raise EmitError(f"{path} is no checkpoint of this model: {'; '.join(wrong[:8])}.")
