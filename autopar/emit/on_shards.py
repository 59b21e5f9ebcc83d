"""Optimizers on this rank's shards: for all that treat every element of a parameter alike."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.emit.parameters import local
from autopar.emit.torch_private import laid_out_as
from autopar.errors import ConfigError

T = TypeVar("T", bound=torch.optim.Optimizer)

WHOLE = tuple(getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, name))
"""Optimizers that compute with rows, columns or all of a parameter."""


def on_shards(optimizer: T) -> T:
    """Let `optimizer` step on plain tensors, this rank's shards of its DTensors; returns it.

    Its `fused`, `foreach` and other forms then run where DTensor has no rule for them, and without its cost. Between
    steps parameters and states are DTensors, so that schedulers and checkpoints see what they do without it. Raises
    ConfigError for optimizers whose step is no function of single elements.
    """
    if isinstance(optimizer, WHOLE):
        raise ConfigError(
            f"{type(optimizer).__name__} computes with whole matrices, which no rank has; leave on_shards out, or "
            "give an optimizer that treats every element alike."
        )
    shards = _Shards()
    optimizer.register_step_pre_hook(lambda stepping, *_: shards.enter(stepping))
    optimizer.register_step_post_hook(lambda stepping, *_: shards.leave(stepping))
    return optimizer


class _Shards:
    """Puts shards in place of an optimizer's parameters, and back."""

    def __init__(self) -> None:
        self._whole: list[list[Tensor]] = []

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step."""
        self._whole = []
        for group in optimizer.param_groups:
            whole = list(group["params"])
            self._whole.append(whole)
            group["params"] = [_shard(p) for p in whole]
            for parameter, shard in zip(whole, group["params"], strict=True):
                if parameter in optimizer.state:
                    optimizer.state[shard] = {k: _local(v) for k, v in optimizer.state.pop(parameter).items()}

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """After it."""
        for group, whole in zip(optimizer.param_groups, self._whole, strict=True):
            for parameter, shard in zip(whole, group["params"], strict=True):
                if shard in optimizer.state:
                    found = optimizer.state.pop(shard)
                    optimizer.state[parameter] = {k: _laid_out(k, v, shard, parameter) for k, v in found.items()}
            group["params"] = whole


def _shard(parameter: Tensor) -> Tensor:
    shard = nn.Parameter(local(parameter.detach()), parameter.requires_grad)
    shard.grad = None if parameter.grad is None else local(parameter.grad)
    return shard


def _local(value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value


def _laid_out(key: str, value: Any, shard: Tensor, parameter: Tensor) -> Any:
    """A state of the shard's shape as one of the parameter's; anything else as it is."""
    alike = isinstance(value, Tensor) and value.shape == shard.shape and key != "step"
    return laid_out_as(parameter, value) if alike else value
