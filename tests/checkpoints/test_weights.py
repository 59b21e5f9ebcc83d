"""Published weights: each rank reads its own part of the files, into any plan."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from autopar.checkpoints import load_safetensors
from autopar.emit.parameters import local
from autopar.errors import EmitError
from tests.checkpoints.runs import Case, case, made, whole
from tests.integration.models import example
from tests.pool import Pool

NAME = "odd gpt"


class Counted:
    """A slice of a file that counts what is read of it."""

    read = 0

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, index: Any) -> Any:
        found = self._source[index]
        Counted.read += found.numel()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def counting(opened: Any) -> Any:
    """`safe_open` with counted slices."""

    class Opened:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._file = opened(*arguments, **named)

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> Any:
            return self._file.__exit__(*error)

        def get_slice(self, name: str) -> Counted:
            return Counted(self._file.get_slice(name))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    return Opened


def read(case: Case, folder: str) -> int:
    """Load under a plan; how many values more were read than this rank holds."""
    pm, _ = made(case)
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.zero_()
    opened, safetensors.safe_open = safetensors.safe_open, counting(safetensors.safe_open)  # type: ignore[misc]
    Counted.read = 0
    try:
        load_safetensors(pm, folder, lambda name: f"model.{name}")
    finally:
        safetensors.safe_open = opened  # type: ignore[misc]
    wanted = example(NAME)[0].state_dict()
    for name, value in pm.state_dict().items():
        assert torch.equal(whole(value), wanted[name].bfloat16().double()), name
    return Counted.read - sum(local(p).numel() for p in pm.parameters())


def published(folder: Path) -> None:
    """The model's weights in bfloat16, in two files, the tied head left out."""
    state = {f"model.{n}": t.bfloat16() for n, t in example(NAME)[0].named_parameters()}
    names = list(state)
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({n: state[n] for n in some}, folder / f"model-{number}.safetensors")


def test_each_rank_reads_its_own_part(pool: Pool, tmp_path: Path) -> None:
    """Rows of an uneven vocabulary and columns of weights are read by who holds them, and cast."""
    published(tmp_path)
    for text in ("dp=2,tp=2,zero=1", "1/3 dp=2,zero=3"):
        assert pool.run(4, read, case(NAME, text), str(tmp_path)) == [0] * 4


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """Missing names, other shapes and empty folders are said; the plain model loads what fits."""
    model = copy.deepcopy(example(NAME)[0])
    with pytest.raises(EmitError, match="no file"):
        load_safetensors(model, tmp_path)
    published(tmp_path)
    with pytest.raises(EmitError, match="is not in it"):
        load_safetensors(model, tmp_path)
    with pytest.raises(EmitError, match="would both be"):
        load_safetensors(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path, lambda _: "model.norm.weight")
    load_safetensors(model, tmp_path, lambda name: f"model.{name}")
    assert torch.equal(model.get_parameter("norm.weight"), model.get_parameter("norm.weight").bfloat16().double())
