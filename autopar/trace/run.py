"""Run single operators of a graph on tensors: on meta to learn about them, on a device to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.graph import Argument, DeviceArg, Dtype, Extent, Op, Ref


def overload(target: str) -> Any:
    """The torch operator called `target` (`aten.linear.default`)."""
    namespace, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)


def argument(op: Op, name: str, default: Argument = None) -> Argument:
    """The argument called `name` in the operator's schema, as given or by its default."""
    for position, declared in enumerate(overload(op.target)._schema.arguments):
        if declared.name == name:
            given: Any = (
                op.args[position] if position < len(op.args) else dict(op.kwargs).get(name, declared.default_value)
            )
            return tuple(given) if isinstance(given, list) else given
    return default


def run_op(op: Op, env: Mapping[str, Tensor], batch: int, device: str | torch.device) -> tuple[Tensor, ...]:
    """Results of `op`, operands taken from `env`, sizes at `batch` samples, new tensors on `device`."""
    args = [_value(a, env, batch, device) for a in op.args]
    kwargs = {k: _value(a, env, batch, device) for k, a in op.kwargs}
    result = overload(op.target)(*args, **kwargs)
    return (result,) if isinstance(result, Tensor) else tuple(r for r in result or () if isinstance(r, Tensor))


def _value(argument: Argument, env: Mapping[str, Tensor], batch: int, device: str | torch.device) -> Any:
    match argument:
        case Ref(name):
            return env[name]
        case Dtype(name):
            return getattr(torch, name)
        case DeviceArg():
            return torch.device(device)
        case Extent():
            return argument.at(batch)
        case tuple():
            return [_value(a, env, batch, device) for a in argument]
        case _:
            return argument
