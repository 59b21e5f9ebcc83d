"""A submodule of the model as one operator: called as it is, with the tensors of the plan in place of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.trace.nested import flatten
from autopar.trace.opaque import decoded, form_of
from autopar.trace.shadow import shadow


class OpaqueCall(nn.Module):
    """Calls `module` (a copy without data) with given parameters, buffers and arguments."""

    def __init__(self, module: nn.Module, form: str, training: bool) -> None:
        super().__init__()
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
        if draw is None:
            return self._call(own, args, dict(kwargs))
        # All ranks that hold the same samples draw the same numbers, and so does what runs again in the backward pass.
        devices = [tensors[0].device] if tensors and tensors[0].is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(draw[0]))
            return self._call(own, args, dict(kwargs))

    def _call(self, own: dict[str, Tensor], args: list[object], kwargs: dict[str, object]) -> list[Tensor]:
        output = functional_call(self._module[0], own, tuple(args), kwargs)
        return [leaf for leaf in flatten(output).leaves if isinstance(leaf, Tensor)]
