"""A layer and a stage as modules: layers call their shared program, the stage runs them along its route."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from autopar.emit.again import making_again
from autopar.emit.offload import offloading
from autopar.emit.program import is_told
from autopar.emit.route import Route
from autopar.emit.source.read import StageSource
from autopar.emit.torch_private import at_end_of_backward, is_profiled
from autopar.shard.program import Program


class LayerCode(Protocol):
    """What runs a layer: the plan's own code, a function in a file, or either of them compiled."""

    program: Program
    makes_again: bool
    """Whether results that it makes again in the backward pass are not to be kept."""

    def at(self, batch: int, training: bool) -> Callable[..., Any]:
        """What takes draw, parameters, buffers and inputs, at a global microbatch of `batch` samples."""


class ParameterHolder(nn.Module):
    """A module whose parameters FSDP2 gathers and frees: it swaps the attributes."""

    def hold(self, name: str, tensor: Tensor, trainable: bool) -> str:
        """Register `tensor`; returns the name of the attribute."""
        attribute = name.replace(".", "__")
        self.register_parameter(attribute, nn.Parameter(tensor, trainable))
        return attribute

    def reader(self, attribute: str) -> Callable[[], Tensor]:
        """How to read what stands at the attribute at the time."""
        return lambda: self._parameters[attribute]  # type: ignore[return-value]


class LayerModule(ParameterHolder):
    """One layer of the model, the `index`-th; `name` is what profilers show its forward pass as.

    `sources` gives the parameters and buffers in the order of the program, as local tensors. `updates` are buffers with
    the places of their new values among the outputs; they are put in place in training, once a forward pass. With
    `offloads` what is saved for the backward pass is kept in the host's memory.
    """

    def __init__(self, index: int, name: str, code: LayerCode, offloads: bool = False) -> None:
        super().__init__()
        self.offloads = offloads
        self.index, self.name = index, name
        self.code = code
        self.sources: list[Callable[[], Tensor]] = []
        self.updates: list[tuple[Tensor, int]] = []

    def forward(self, batch: int, draw: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The layer's outputs at a global microbatch of `batch` samples; all tensors are local."""
        code = self.code.at(batch, self.training)
        if draw is not None:
            draw = torch.cat([draw[:1] + self.index, draw[1:]])
        held = [source() for source in self.sources]
        named = record_function(self.name) if is_profiled() else nullcontext()
        keeping = offloading(held) if self.offloads else making_again() if self.code.makes_again else nullcontext()
        with named, keeping:
            outputs = code(draw, *held, *inputs)
        for buffer, place in self.updates if self.training else ():
            buffer.copy_(outputs[place])
        return outputs  # type: ignore[no-any-return]


class StageModule(ParameterHolder):
    """All layers of one stage, and the parameters that several of them share: the root for FSDP2.

    `draws`: whether any layer draws random numbers.
    """

    def __init__(self, layers: list[LayerModule], route: Route | StageSource) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._route = route
        self.draws = any(is_told(step) for layer in layers for step in layer.code.program.steps)

    def forward(
        self, values: dict[str, Tensor], batch: int, draw: Tensor | None, on_backward: Callable[[], None] | None
    ) -> Tensor:
        """The loss of a global microbatch of `batch` samples, of which `values` are this rank's rows.

        `draw` says what dropout masks to draw; `on_backward` is called when a backward pass from the loss has ended.
        """
        (loss,) = self._route.run(values, batch, lambda i, inputs: self.layers[i](batch, draw, *inputs))
        # Inside the root's forward, so that FSDP's own callback, queued by its hooks on the root's output, comes first.
        return loss if on_backward is None else OnBackward.apply(loss, on_backward)  # type: ignore[no-untyped-call]


class OnBackward(torch.autograd.Function):
    """The identity; when its backward has run, `callback` is called at the end of that backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, callback: Callable[[], None]) -> Tensor:
        """Return `tensor` and remember `callback`."""
        ctx.callback = callback
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on and queue the callback."""
        at_end_of_backward(ctx.callback)
        return gradients[0], None
