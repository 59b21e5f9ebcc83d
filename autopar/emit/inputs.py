"""The batch a rank is given: checked against the graph, and cut into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import EmitError
from autopar.graph import Constant, OpGraph
from autopar.trace.inputs import bind, constant


class Names:
    """The names a model's inputs have in the graph; keeps the signature of its `forward`, not the model.

    `constants` are the arguments that are no tensors, with the values the model was traced with.
    """

    def __init__(self, module: nn.Module, constants: Mapping[str, Constant]) -> None:
        def forward(*_: Any, **__: Any) -> None:
            return None

        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self._stand_in = nn.Module()
        self._stand_in.forward = forward
        self._parameters = inspect.signature(module.forward).parameters
        self._constants = constants

    def of(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors by the graph's names for inputs. Raises EmitError where a constant is not what was traced."""
        named = list(self._parameters)
        if len(args) > len(named):
            raise EmitError(f"{len(args)} positional inputs given; the model takes {len(named)}: {named}.")
        both = dict(zip(named, args, strict=False)) | keywords
        if not both:
            return {}
        bound = bind(self._stand_in, both)
        for name, given in bound.constants.items():
            self._check_constant(name, given, bound.names)
        return dict(zip(bound.names, bound.tensors, strict=True))

    def _check_constant(self, name: str, given: Constant, tensors: tuple[str, ...]) -> None:
        if name in self._constants:
            traced = self._constants[name]
        elif name in self._parameters and not any(n.startswith(f"{name}.") for n in self._constants):
            # it was left out: the model took its default
            traced = constant(self._parameters[name].default)
        else:
            raise EmitError(
                f"input {name!r} = {given!r} was not among the example inputs ({[*tensors, *self._constants]}). Leave "
                f"it out, or make a plan with it."
            )
        if type(given) is not type(traced) or given != traced:
            raise EmitError(
                f"input {name!r} is {given!r}; the model was traced with {traced!r}, which is part of the plan. Pass "
                f"that or leave it out, or make a plan for the other value."
            )


def check_inputs(graph: OpGraph, given: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The graph's inputs from those given by flattened name, on `device` and in the graph's dtypes.

    Raises EmitError on a missing or unknown input, or one whose dims that don't grow with the batch differ.
    """
    missing = [n for n in graph.inputs if n not in given]
    unknown = [n for n in given if n not in graph.inputs]
    if missing or unknown:
        raise EmitError(
            f"inputs missing: {missing or 'none'}; unknown: {unknown or 'none'}. The plan was made for tensor inputs "
            f"{list(graph.inputs)}; pass these, or make a plan for other example inputs."
        )
    return {name: _fit(graph, name, given[name], device) for name in graph.inputs}


def _fit(graph: OpGraph, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    spec = graph.values[name]
    fixed = all(e.is_batch or e.fixed == s for e, s in zip(spec.shape, tensor.shape, strict=False))
    if len(spec.shape) != tensor.dim() or not fixed:
        shape = "x".join(map(str, spec.shape))
        raise EmitError(
            f"input {name!r} has shape {tuple(tensor.shape)}; the plan was made for {shape} (B = batch). "
            f"Pass that shape, or make a plan for other example inputs."
        )
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point != tensor.is_floating_point():
        raise EmitError(f"input {name!r} has dtype {tensor.dtype}; the plan was made for {spec.dtype}. Convert it.")
    return tensor.to(device=device, dtype=dtype)


def rows_of(graph: OpGraph, inputs: Mapping[str, Tensor]) -> int:
    """Samples in `inputs`. Raises EmitError if they disagree."""
    found: dict[str, int] = {}
    for name, tensor in inputs.items():
        dim = graph.values[name].batch_dim
        if dim is not None:
            extent = graph.values[name].shape[dim]
            found[name] = (tensor.shape[dim] - extent.fixed) // extent.per_sample
    if not found and graph.only_batch is not None:
        return graph.only_batch
    if len(set(found.values())) != 1:
        raise EmitError(f"samples by input: {found or 'none has a batch dim'}; all inputs must have the same number.")
    return next(iter(found.values()))


def microbatches(graph: OpGraph, inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """`count` equal slices of a rank's rows; inputs without a batch dim go to each whole.

    Raises EmitError where the rows can't be dealt out evenly.
    """
    rows = rows_of(graph, inputs)
    if rows % count:
        raise EmitError(f"{rows} samples on this rank can't be cut into {count} equal microbatches. Pass a multiple.")
    cut: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in inputs.items():
        dim = graph.values[name].batch_dim
        whole = dim is None or count == 1 or not rows
        parts = [tensor] * count if whole else tensor.chunk(count, dim or 0)
        for k, part in enumerate(parts):
            cut[k][name] = part
    return cut
