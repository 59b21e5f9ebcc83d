"""Layers run by `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from autopar.emit.layers import LayerCode, LayerModule, StageModule


class CompiledCode:
    """The code of a layer, compiled for each global microbatch size when it is first met; takes the place of `code`.

    `options` are those of `torch.compile`. Layers that share their code share what is compiled.
    """

    def __init__(self, code: LayerCode, options: Mapping[str, Any]) -> None:
        self.program, self.makes_again = code.program, False
        self._code, self._options = code, {"dynamic": False} | dict(options)
        self._compiled: dict[tuple[int, bool], Callable[..., Any]] = {}

    def at(self, batch: int, training: bool) -> Callable[..., Any]:
        """The compiled code at a global microbatch of `batch` samples."""
        key = (batch, training)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(self._code.at(batch, training), **self._options)
        return self._compiled[key]


def compile_layers(stages: Iterable[StageModule], options: Mapping[str, Any]) -> None:
    """Let the layers of `stages` run compiled; those that share their code share what is made of it."""
    made: dict[int, LayerCode] = {}
    for stage in stages:
        for layer in stage.modules():
            if isinstance(layer, LayerModule):
                if isinstance(layer, FSDPModule):
                    layer.set_unshard_in_backward(True)  # what compiled code keeps for it isn't known
                layer.code = made.setdefault(id(layer.code), CompiledCode(layer.code, options))
