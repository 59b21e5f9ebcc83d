"""The model's own names, as those of the parallel module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from autopar.trace.torch_private import is_persistent, named_tensors


def register(
    target: nn.Module,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Register parameters and buffers, given by their first names, in `target` under all names they have in `model`."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        if aliases.get(name, name) in parameters:
            owner, key = _owner(target, name)
            owner.register_parameter(key, parameters[aliases.get(name, name)])
    for name, _ in named_tensors(model):
        tensor = buffers.get(aliases.get(name, name))
        if tensor is not None:
            owner, key = _owner(target, name)
            path, _, _ = name.rpartition(".")
            owner.register_buffer(key, tensor, persistent=is_persistent(model.get_submodule(path), key))


def _owner(target: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module in which the last part of a dotted name is registered; made if need be."""
    owner = target
    *path, key = name.split(".")
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner, key
