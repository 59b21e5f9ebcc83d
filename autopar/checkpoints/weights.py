"""Weights that others published: read from safetensors, each rank its own part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from autopar.checkpoints.states import mismatches
from autopar.errors import EmitError


def load_safetensors(model: nn.Module, folder: str | Path, rename: Callable[[str], str] = lambda name: name) -> None:
    """Load the model's values from all `*.safetensors` in `folder`; collective over the job.

    `model` is a ParallelModule or the model itself; `rename` gives the name in the files for one of the model. Each
    rank reads the rows and columns that it holds, and no more; values are cast. Of tied parameters one name has to be
    there. Raises EmitError where a name is missing or a shape differs; nothing is loaded then.
    """
    path = Path(folder)
    if not any(path.glob("*.safetensors")):
        raise EmitError(f"{path}: there is no file *.safetensors; give the folder of the model's weights.")
    reader = HuggingFaceStorageReader(str(path))
    stored = reader.read_metadata().state_dict_metadata
    wanted = _first_names(model, {n for n in model.state_dict() if rename(n) in stored})
    state = {rename(n): t for n, t in wanted.items()}
    wrong = [*mismatches(state, stored), *_clashes(wanted, rename)]
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        every: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(every, wrong)
        wrong = [*dict.fromkeys(w for one in every for w in one)]
    if wrong:
        raise EmitError(f"{path} doesn't hold this model's weights: {'; '.join(wrong[:8])}. Give `rename`?")
    load(state, storage_reader=reader, no_dist=not several)


def _first_names(model: nn.Module, there: set[str]) -> dict[str, Tensor]:
    """Each tensor of the model's state under one of its names, one that is `there` if any is."""
    found: dict[int, tuple[str, Tensor]] = {}
    tensors = dict(model.state_dict(keep_vars=True))
    for name, tensor in tensors.items():
        known = found.get(id(tensor))
        if known is None or (known[0] not in there and name in there):
            found[id(tensor)] = name, tensor
    return {name: tensor.detach() for name, tensor in found.values()}


def _clashes(wanted: dict[str, Tensor], rename: Callable[[str], str]) -> list[str]:
    """Names of the model that would be read from one name of the files."""
    by_name: dict[str, list[str]] = {}
    for name in wanted:
        by_name.setdefault(rename(name), []).append(name)
    return [f"{' and '.join(names)} would both be {there}" for there, names in by_name.items() if len(names) > 1]
