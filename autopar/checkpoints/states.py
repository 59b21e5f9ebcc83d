"""What a checkpoint holds of a module and its optimizer: one entry a tensor, under the parameter's own name.

Names are those of `torch.distributed.checkpoint.state_dict` with flattened optimizers: no rank needs to know which
parameters, or which numbers of them, others have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.errors import EmitError

Entries: TypeAlias = dict[str, Any]
Stored: TypeAlias = Mapping[str, Any]
"""Of what is in a checkpoint, by name: `TensorStorageMetadata` of a tensor, something else of any other value."""

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what: they are the running optimizer's own."""


def optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    """States and options of an optimizer over parameters of `model`. Raises EmitError where it has others."""
    found: Entries = {}
    for name, parameter, group in _named(model, optimizer):
        found |= {f"state.{name}.{k}": v for k, v in optimizer.state.get(parameter, {}).items()}
        found |= {f"param_groups.{name}.{k}": v for k, v in _options(group).items()}
    return found


def optimizer_places(model: nn.Module, optimizer: torch.optim.Optimizer, stored: Stored) -> Entries:
    """Entries to load an optimizer into: every state that is stored, laid out as its parameter where shapes agree.

    The optimizer need not have taken a step. Raises EmitError where what is stored is no such optimizer's.
    """
    kept: dict[str, dict[str, Any]] = {}
    for key, entry in stored.items():
        place, _, last = key.rpartition(".")
        kept.setdefault(place, {})[last] = entry
    found: Entries = {}
    for name, parameter, group in _named(model, optimizer):
        options = kept.get(f"param_groups.{name}", {})
        if missing := sorted({*_options(group)} - {*options, *HOW, "initial_lr"}):
            have = f"has {', '.join(sorted(options))}" if options else "has nothing of it"
            raise EmitError(
                f"{type(optimizer).__name__} has the options {', '.join(missing)} for {name}; the checkpoint {have}. "
                "Load with the optimizer it was saved with, over the same parameters."
            )
        found |= {f"param_groups.{name}.{k}": None for k in options}
        states = kept.get(f"state.{name}", {})
        found |= {f"state.{name}.{k}": _place(k, entry, parameter, group) for k, entry in states.items()}
    return found


def put_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, entries: Entries) -> None:
    """Let the optimizer go on from loaded `entries`; its values are taken as they are, without a change of dtype."""
    states: dict[str, Entries] = {}
    for key, value in entries.items():
        place, _, last = key.rpartition(".")
        states.setdefault(place, {})[last] = value
    for name, parameter, group in _named(model, optimizer):
        options = states[f"param_groups.{name}"]
        group.update({k: v for k, v in options.items() if k not in HOW})
        optimizer.state.pop(parameter, None)
        if f"state.{name}" in states:
            optimizer.state[parameter] = states[f"state.{name}"]


def mismatches(tensors: Mapping[str, Any], stored: Stored) -> list[str]:
    """What is to be loaded and isn't stored, or in another shape."""
    found = [f"{name} is not in it" for name in tensors if name not in stored]
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if isinstance(tensor, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            found.append(f"{name} has shape {tuple(entry.size)} in it and is {tuple(tensor.shape)} here")
    return found


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Each parameter of the optimizer with its name in the model and its group."""
    names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups if names else ():  # on an idle rank there is nothing to keep
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise EmitError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that the module "
                    "doesn't have; make it over the module's own parameters()."
                )
            yield names[id(parameter)], parameter, group


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _place(key: str, entry: Any, parameter: Tensor, group: dict[str, Any]) -> Any:
    """What a state is loaded into: None where it is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if entry.size == parameter.shape and key != "step":
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    here = group.get("fused") or group.get("capturable") or key != "step"
    return torch.empty(entry.size, dtype=dtype, device=parameter.device if here else "cpu")
