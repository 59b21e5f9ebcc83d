"""What forward does beside computing, kept out of a trace: autocast, checks of values, what it leaves on modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast


@contextmanager
def without_autocast() -> Iterator[list[bool]]:
    """Inside, regions of autocast do nothing: dtypes are those of the plan. Yields whether each region was to cast.

    Tensors without data are on no device that has an autocast: asking for it (`x.device.type`) would fail.
    """
    names = ("__init__", "__enter__", "__exit__")
    own: dict[str, Any] = {name: vars(autocast)[name] for name in names}
    asked: list[bool] = []

    def begin(*args: Any, **kwargs: Any) -> None:  # self, device_type, dtype, enabled, ...
        asked.append(args[3] if len(args) > 3 else kwargs.get("enabled", True))

    made: tuple[Any, ...] = (begin, lambda self: self, lambda *_: None)
    try:
        for name, function in zip(names, made, strict=True):
            setattr(autocast, name, function)
        yield asked
    finally:
        for name, function in own.items():
            setattr(autocast, name, function)


@contextmanager
def without_checks() -> Iterator[None]:
    """Inside, distributions don't check their parameters, as tensors without data have no values to check."""
    kind = torch.distributions.Distribution
    before: bool = vars(kind)["_validate_args"]
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """Modules are afterwards as they were: buffers and attributes that forward sets (tables it makes once) are gone."""
    before = [(module, _state(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, state in before:
            vars(module).clear()
            vars(module).update(state)


def _state(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module; those that are plain collections as they are now."""
    return {k: v.copy() if type(v) in (dict, OrderedDict, set, list) else v for k, v in vars(module).items()}
