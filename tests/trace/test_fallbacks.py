"""What tracing gives up is said; mistakes of its own are not taken for a model's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import marker, trace
from autopar.trace.convert import Converter
from autopar.trace.layers import blocks
from autopar.trace.layers.recording import Recording


class Block(nn.Module):
    """A block with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


def traced() -> tuple[str, ...]:
    return trace(model(), (torch.zeros(2, 4),), loss_fn=lambda out: out.mean()).assumptions


MISTAKE = "def mistake(*_, **__):\n    raise KeyError('a mistake of tracing itself')"


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Converter, "_call"), (marker, "_mark"), (Recording, "note"), (blocks, "skeleton"), (blocks, "attributes_at")],
)
def test_own_mistakes_are_raised(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """A mistake inside tracing is raised as it is, not turned into another attempt."""
    scope: dict[str, Any] = {}
    own = owner if isinstance(owner, ModuleType) else sys.modules[owner.__module__]
    exec(compile(MISTAKE, str(own.__file__), "exec"), scope)
    monkeypatch.setattr(owner, name, scope["mistake"])
    with pytest.raises(KeyError, match="a mistake of tracing itself"):
        traced()


def test_nothing_is_assumed_of_a_usual_model() -> None:
    """No attempt fails, so nothing is said."""
    assert not traced()


@pytest.mark.parametrize("place", ["recording", "export"])
def test_fallbacks_are_said(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Where torch fails while equal blocks are told apart, or taken once, that each is traced is an assumption."""
    original = Block.forward

    def forward(self: Block, x: Tensor) -> Tensor:
        grouping = x.device.type == "meta" and not isinstance(x, torch._subclasses.FakeTensor)
        if place == "recording" and grouping:
            raise RuntimeError("not under a recorder")
        return original(self, x)

    def stand_in(*_: Any) -> None:
        raise RuntimeError("not once")

    monkeypatch.setattr(Block, "forward", forward)
    if place == "export":
        monkeypatch.setattr(torch.ops.autopar_trace.block, "default", stand_in)
    (said,) = traced()
    assert ("not under a recorder" if place == "recording" else "not once") in said
