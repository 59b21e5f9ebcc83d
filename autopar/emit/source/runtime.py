"""What the files of stages are made of: groups of ranks by mesh axes, and the moves of shards between them.

Tensors are local shards. Moves are those of `autopar.shard.collectives`; `lengths` and `then` are what each rank of the
group holds of a dim before and after, where these are not equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.emit.again import made_again
from autopar.emit.groups import StageGroups
from autopar.emit.opaque import OpaqueCall, drawn
from autopar.errors import EmitError
from autopar.shard import kernels
from autopar.shard.collectives import relayout
from autopar.shard.localize import CallInfo, Share

__all__ = [
    "Axes", "CallInfo", "Here", "Share", "Submodule", "all_gather", "all_reduce", "all_to_all", "divide", "drawn",
    "kernels", "made_again", "pad", "pick", "recomputed", "recut", "reduce_scatter", "relayout", "split",
]  # fmt: skip

Lengths = tuple[int, ...]


class Axes:
    """Some axes of the stage's mesh: the ranks that differ from this one only there. With `prime`, prime factors."""

    def __init__(self, *axes: int, prime: bool = False) -> None:
        self.axes, self.prime = axes, prime
        self.name, self.index, self.size = "", 0, 1

    def bind(self, groups: StageGroups) -> None:
        """Take the process group of this rank. Raises EmitError where the plan makes none over these axes."""
        if not groups.made(self.axes):
            raise EmitError(f"Axes{self.axes}: the plan uses no group over these axes; use one that it does.")
        self.name, self.index = groups.name(self.axes), groups.index(self.axes)
        self.size = prod(groups.sizes[a] for a in self.axes)


class Here:
    """The device of this rank."""

    device = torch.device("cpu")


class Submodule:
    """The model's submodule at `path`, called as it is; `form` says what its arguments are and which tensors it has."""

    def __init__(self, path: str, form: str, training: bool) -> None:
        self._of = path, form, training
        self._call: OpaqueCall | None = None

    def bind(self, submodule: Callable[[str], nn.Module]) -> None:
        """Take the submodule."""
        path, form, training = self._of
        self._call = OpaqueCall(submodule(path), path, form, training)

    def __call__(self, draw: Tensor | None, *tensors: Tensor) -> list[Tensor]:
        """What it returns for these parameters and buffers, then arguments."""
        if self._call is None:
            raise EmitError(f"{self._of[0]}: a submodule of no model; run the file with optimize(..., source=folder).")
        made: list[Tensor] = self._call(draw, *tensors)
        return made


def pick(over: Axes, *values: Any) -> Any:
    """The value of this rank: there is one for each rank of the group."""
    return values[over.index]


def _move(kind: str, over: Axes, dim: int = -1, to_dim: int = -1, lengths: Lengths = (), then: Lengths = ()) -> str:
    cuts = [",".join(map(str, lengths)) or str(over.size)]
    if to_dim >= 0 or then:
        cuts.append(",".join(map(str, then)) or str(over.size))
    return f"{kind} {dim} {to_dim} {'/'.join(cuts)} {over.name}"


def all_reduce(over: Axes) -> str:
    """Sum over the ranks."""
    return _move("all_reduce", over)


def all_gather(over: Axes, dim: int, lengths: Lengths = ()) -> str:
    """Each gets the parts of all along a dim."""
    return _move("all_gather", over, dim, lengths=lengths)


def reduce_scatter(over: Axes, dim: int, lengths: Lengths = ()) -> str:
    """Sum over the ranks, of which each gets its part along a dim."""
    return _move("reduce_scatter", over, dim, lengths=lengths)


def all_to_all(over: Axes, dim: int, to_dim: int, lengths: Lengths = (), then: Lengths = ()) -> str:
    """From parts along `dim` to parts along `to_dim`."""
    return _move("all_to_all", over, dim, to_dim, lengths, then)


def split(over: Axes, dim: int, lengths: Lengths = ()) -> str:
    """Each keeps its part along a dim; nothing is sent."""
    return _move("slice", over, dim, lengths=lengths)


def pad(over: Axes, dim: int, lengths: Lengths = ()) -> str:
    """The rank's part along a dim, zeros in place of the others; nothing is sent."""
    return _move("pad", over, dim, lengths=lengths)


def divide(over: Axes) -> str:
    """A term of a sum over the ranks that is the value; nothing is sent."""
    return _move("divide", over)


def recut(over: Axes, dim: int, lengths: Lengths, then: Lengths) -> str:
    """Other boundaries between the parts along a dim."""
    return _move("recut", over, dim, lengths=lengths, then=then)


def recomputed(function: Callable[..., Sequence[Tensor]], *inputs: Tensor | None) -> Any:
    """What `function` makes of `inputs`, which alone are kept for the backward pass."""
    return checkpoint(partial(function), *inputs, use_reentrant=False, preserve_rng_state=False)
