"""A copy of a module on the meta device: same classes, attributes, hooks and ties, no storage."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.torch_private import named_tensors


def shadow(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy `model` onto the meta device; floating parameters take `dtype` if given, buffers keep theirs.

    The model itself is untouched. Raises TraceError naming the class when the module can't be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _meta_parameter(parameter, dtype)
    for _, tensor in named_tensors(model):
        memo.setdefault(id(tensor), torch.empty_like(tensor.detach(), device="meta"))
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} can't be copied ({type(error).__name__}: {error}). "
            "Keep open files, locks and process groups out of the module's attributes."
        ) from error
    for module in copied.modules():
        _plain_tensors_to_buffers(module)
        _without_cache(module)
    return copied


def _meta_parameter(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return nn.Parameter(torch.empty_like(parameter, dtype=cast, device="meta"), parameter.requires_grad)


def _plain_tensors_to_buffers(module: nn.Module) -> None:
    """Tensors kept as plain attributes are constants of the model: treat them as buffers of the same name."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor):
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)


def _without_cache(module: nn.Module) -> None:
    """Transformers' configurations ask by default for the keys and values that generation would need: not here."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
