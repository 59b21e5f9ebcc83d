"""Dispatcher ops that stand for whole blocks in an exported graph.

Of equal blocks only the first is traced in full, between two of them: `enter` takes its arguments, `block` its results.
`block` remembers the shapes of these and gives every later block of the kind fresh tensors like them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.trace.nested import flatten

ENTER, BLOCK = "autopar_trace.enter.default", "autopar_trace.block.default"

_LIBRARY = torch.library.Library("autopar_trace", "DEF")
_LIBRARY.define("enter(Tensor[] inputs, int index) -> Tensor[]")
_LIBRARY.define("block(Tensor[] inputs, Tensor[] produced, int kind, int index) -> Tensor[]")
_RESULTS: dict[int, tuple[Tensor, ...]] = {}
_KINDS = itertools.count()


@torch.library.register_fake("autopar_trace::block", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _block_fake(_: list[Tensor], produced: list[Tensor], kind: int, __: int) -> list[Tensor]:
    if produced:
        _RESULTS[kind] = tuple(produced)
    return [_like(r) for r in _RESULTS[kind]]


@torch.library.register_fake("autopar_trace::enter", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _enter_fake(inputs: list[Tensor], _: int) -> list[Tensor]:
    return [_like(x) for x in inputs]


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def new_kind() -> int:
    """A number for a kind of block, unique in the process."""
    return next(_KINDS)


def forget(kind: int) -> None:
    """Drop what is remembered of a kind."""
    _RESULTS.pop(kind, None)


def trace_in_full(block: nn.Module, kind: int, index: int) -> None:
    """Make `block` run as it is between two markers: its arguments go through one, its results through the other."""
    original: Callable[..., Any] = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nested = flatten([args, kwargs])
        inner = _entered(nested.leaves, index)
        args, kwargs = nested.rebuild(inner)
        output = flatten(original(*args, **kwargs))
        made = [i for i, leaf in enumerate(output.leaves) if isinstance(leaf, Tensor) and _index(leaf, inner) is None]
        results = _mark(nested.leaves, [output.leaves[i] for i in made], kind, index)
        new = [leaf if (at := _index(leaf, inner)) is None else nested.leaves[at] for leaf in output.leaves]
        for i, result in zip(made, results, strict=True):
            new[i] = result
        return output.rebuild(new)

    block.forward = forward


def _entered(leaves: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """`leaves` with tensors handed through the marker in front of block `index`."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    inner = iter(torch.ops.autopar_trace.enter.default(tensors, index))
    return tuple(next(inner) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def stand_in(block: nn.Module, first: BlockOutput, kind: int, index: int) -> None:
    """Make `block` return fresh tensors like those of the first of its kind, without running."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = flatten([args, kwargs]).leaves
        return first(leaves, _mark(leaves, [], kind, index))

    block.forward = forward


BlockOutput = Callable[[tuple[Any, ...], list[Tensor]], Any]
"""(flat arguments, tensors made) -> what the block returns."""


def output_like(arguments: tuple[Any, ...], output: Any) -> BlockOutput:
    """How to build a block's output from its flat arguments and the tensors it makes, by example."""
    nested = flatten(output)
    passed_on = {i: _index(leaf, arguments) for i, leaf in enumerate(nested.leaves) if isinstance(leaf, Tensor)}

    def build(leaves: tuple[Any, ...], made: list[Tensor]) -> Any:
        fresh = iter(made)
        new = [
            leaf if i not in passed_on else next(fresh) if (at := passed_on[i]) is None else leaves[at]
            for i, leaf in enumerate(nested.leaves)
        ]
        return nested.rebuild(new)

    return build


def _mark(leaves: tuple[Any, ...], produced: list[Tensor], kind: int, index: int) -> list[Tensor]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return torch.ops.autopar_trace.block.default(tensors, produced, kind, index)  # type: ignore[no-any-return]


def _index(leaf: object, leaves: tuple[Any, ...]) -> int | None:
    return next((i for i, other in enumerate(leaves) if other is leaf), None)
