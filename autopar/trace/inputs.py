"""Example inputs bound to a model's `forward`: tensors by name, everything else kept as constants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.errors import ConfigError
from autopar.graph import Constant
from autopar.trace.nested import Nested, flatten

ExampleInputs: TypeAlias = "Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor"


@dataclass(frozen=True)
class BoundInputs:
    """`names[i]` is the dotted keyword path of `tensors[i]`; `call(tensors)` gives back (args, kwargs, extra).

    `extra` are keywords that `forward` does not take: they are for the loss function. `batch` is the length of dim 0
    that the tensors share (None if there is no tensor with dims); `batched[i]` says whether tensor `i` has it.
    `constants` are the leaves that are no tensors, by path.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    batched: tuple[bool, ...]
    batch: int | None
    constants: dict[str, Constant]
    _nested: Nested
    _where: tuple[int, ...]

    def call(self, tensors: tuple[Any, ...] | list[Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """Arguments, keywords and keywords for the loss, with `tensors` in place of the example's."""
        leaves = list(self._nested.leaves)
        for at, tensor in zip(self._where, tensors, strict=True):
            leaves[at] = tensor
        data = self._nested.rebuild(leaves)
        return data["args"], data["kwargs"], data["extra"]

    def on_meta(self, batch: int | None, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        """A distinct meta tensor for each input, at another batch size and floating ones in another dtype."""
        return tuple(
            _meta(t, batch if shares else None, dtype) for t, shares in zip(self.tensors, self.batched, strict=True)
        )


def bind(model: nn.Module, example_inputs: ExampleInputs) -> BoundInputs:
    """Bind `example_inputs` (keywords, positional tuple or one tensor) to `model.forward`.

    Raises ConfigError when there is no tensor, or something other than these is given.
    """
    args, kwargs = _args_and_kwargs(example_inputs)
    kwargs, extra = _split_keywords(model, kwargs)
    nested = flatten({"args": args, "kwargs": kwargs, "extra": extra})
    where = tuple(i for i, leaf in enumerate(nested.leaves) if isinstance(leaf, Tensor))
    tensors = tuple(nested.leaves[i] for i in where)
    if not tensors:
        raise ConfigError("example_inputs holds no tensor. Give the tensors of one batch, batch first.")
    batch = next((int(t.shape[0]) for t in tensors if t.ndim), None)
    paths = [_name(path, _positional_names(model)) for path in nested.paths]
    names = tuple(paths[i] for i in where)
    constants = {p: constant(v) for p, v in zip(paths, nested.leaves, strict=True) if not isinstance(v, Tensor)}
    batched = tuple(bool(t.ndim) and int(t.shape[0]) == batch for t in tensors)
    return BoundInputs(names, tensors, batched, batch, constants, nested, where)


def constant(value: object) -> Constant:
    """`value` as it is kept in a graph."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else f"<{type(value).__qualname__}>"


def _args_and_kwargs(example_inputs: ExampleInputs) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(example_inputs, Tensor):
        return [example_inputs], {}
    if isinstance(example_inputs, Mapping):
        return [], dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return list(example_inputs), {}
    kind = type(example_inputs).__name__
    raise ConfigError(f"example_inputs is a {kind}. Give a dict of keyword arguments, a tuple, or one tensor.")


def _split_keywords(model: nn.Module, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs, {}
    taken = {k: v for k, v in kwargs.items() if k in parameters}
    return taken, {k: v for k, v in kwargs.items() if k not in parameters}


def _positional_names(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]


def _name(path: str, positional: list[str]) -> str:
    """`kwargs.x.y` -> `x.y`; `args.0.y` -> the first parameter's name and `.y`."""
    group, _, rest = path.partition(".")
    if group != "args":
        return rest
    index, _, rest = rest.partition(".")
    first = positional[int(index)] if int(index) < len(positional) else f"args.{index}"
    return f"{first}.{rest}" if rest else first


def _meta(tensor: Tensor, batch: int | None, dtype: torch.dtype | None) -> Tensor:
    shape = list(tensor.shape) if batch is None else [batch, *tensor.shape[1:]]
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(shape, dtype=cast, device="meta")
