"""A submodule of the model as one operator: called as it is, with the tensors of the plan in place of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.trace.nested import flatten
from autopar.trace.opaque.operator import decoded, form_of
from autopar.trace.run import overload
from autopar.trace.shadow import shadow


class OpaqueCall(nn.Module):
    """Calls `module` (a copy without data), at `path` in the model, with given parameters, buffers and arguments."""

    def __init__(self, module: nn.Module, path: str, form: str, training: bool) -> None:
        super().__init__()
        self.path, self.form = path, form
        self._form = form_of(form)
        self._module = [shadow(module)]  # in a list: its parameters are not parameters of the code
        if not training:
            self._module[0].eval()

    def forward(self, draw: Tensor | None, *tensors: Tensor) -> list[Tensor]:
        """The tensors it returns; `tensors` are parameters and buffers, then those among the arguments.

        `draw` says what random numbers to draw, where it draws any: see `kernels.dropout`.
        """
        names = self._form.names
        args, kwargs = decoded(self._form.call, tensors[len(names) :])
        own = dict(zip(names, tensors, strict=False))
        if not self._form.draws:
            return self._call(own, args, dict(kwargs))
        made: list[Tensor] = seeded(draw, "", lambda: self._call(own, args, dict(kwargs)))
        return made

    def _call(self, own: dict[str, Tensor], args: list[object], kwargs: dict[str, object]) -> list[Tensor]:
        output = functional_call(self._module[0], own, tuple(args), kwargs)
        return [leaf for leaf in flatten(output).leaves if isinstance(leaf, Tensor)]


def seeded(draw: Tensor | None, salt: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, its random numbers drawn from a seed of this step, this layer and `salt`.

    All ranks that have all samples draw the same numbers, and so does what runs again in the backward pass. Outside
    training, where `draw` is None, every step draws the same.
    """
    seed = 0 if draw is None else int(draw[0])
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed ^ zlib.crc32(salt.encode()))
        return work()


def drawn(draw: Tensor | None, salt: str, target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an ATen operator that draws random numbers."""
    return seeded(draw, salt, lambda: overload(target)(*args, **kwargs))
