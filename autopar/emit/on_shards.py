"""Optimizers on plain tensors: on this rank's shards where every element is treated alike, else on whole ones."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

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
            f"{type(optimizer).__name__} computes with whole matrices, which no rank has; give it to on_wholes, or "
            "give an optimizer that treats every element alike."
        )
    return _swapping(optimizer, _Shards())


def on_wholes(optimizer: T) -> T:
    """Let `optimizer` step on whole parameters, gathered for the step; returns it.

    For those that compute with rows, columns or all of each parameter (Adafactor, Muon): every rank of a stage takes
    the same step. While it does it holds parameters, gradients and states of its stage whole; between steps those of
    the parameter's shape are dealt out as it is. Collective over each stage. Raises ConfigError for optimizers that
    compute with all parameters at once, which no rank of a pipeline has.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS computes with all parameters at once, several times a step; give another optimizer.")
    return _swapping(optimizer, _Wholes())


def _swapping(optimizer: T, swap: _Shards) -> T:
    optimizer.register_step_pre_hook(lambda stepping, *_: swap.enter(stepping))
    optimizer.register_step_post_hook(lambda stepping, *_: swap.leave(stepping))
    return optimizer


class _Shards:
    """Puts shards in place of an optimizer's parameters, and back."""

    def __init__(self) -> None:
        self._own: list[list[Tensor]] = []

    def plain(self, tensor: Tensor) -> Tensor:
        """What the optimizer is given for a DTensor."""
        return local(tensor)

    def laid_out(self, plain: Tensor, like: Tensor) -> Tensor:
        """The DTensor, laid out as `like`, that it stands for."""
        return laid_out_as(like, plain)

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step."""
        self._own = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            own, group["params"] = group["params"], [self._given(p) for p in group["params"]]
            for parameter, given in zip(own, group["params"], strict=True):
                if parameter in optimizer.state:
                    states = optimizer.state.pop(parameter).items()
                    optimizer.state[given] = {k: self.plain(v) if isinstance(v, Tensor) else v for k, v in states}

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """After it."""
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            for parameter, given in zip(own, group["params"], strict=True):
                self._take_back(parameter, given)
                if given in optimizer.state:
                    states = optimizer.state.pop(given).items()
                    optimizer.state[parameter] = {k: self._kept(k, v, given, parameter) for k, v in states}
            group["params"] = own

    def _given(self, parameter: Tensor) -> Tensor:
        given = nn.Parameter(self.plain(parameter.detach()), parameter.requires_grad)
        given.grad = None if parameter.grad is None else self.plain(parameter.grad)
        return given

    def _take_back(self, parameter: Tensor, given: Tensor) -> None:
        """Let the parameter have the values that the optimizer has made: a shard shares its memory."""

    def _kept(self, key: str, value: Any, given: Tensor, parameter: Tensor) -> Any:
        """A state of the given tensor's shape as one of the parameter's; anything else as it is."""
        alike = isinstance(value, Tensor) and value.shape == given.shape and key != "step"
        return self.laid_out(value, parameter) if alike else value


class _Wholes(_Shards):
    """Puts whole tensors in place of an optimizer's parameters, and shards of them back."""

    def plain(self, tensor: Tensor) -> Tensor:
        """All of a DTensor."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def laid_out(self, plain: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as a DTensor."""
        if not isinstance(like, DTensor):
            return plain
        everywhere = [Replicate()] * like.device_mesh.ndim
        whole = DTensor.from_local(plain, like.device_mesh, everywhere, run_check=False)
        return laid_out_as(like, whole.redistribute(placements=like.placements).to_local().contiguous())

    def _take_back(self, parameter: Tensor, given: Tensor) -> None:
        if isinstance(parameter, DTensor):
            with torch.no_grad():
                local(parameter).copy_(local(self.laid_out(given.detach(), parameter)))
