"""What a block does, operator by operator, told on a forward pass on meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.trace import marker
from autopar.trace.nested import flatten
from autopar.trace.torch_private import storage_id


class Recording:
    """What one block did."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        self.build: marker.BlockOutput | None = None
        self._made: list[Tensor] = []
        self._facts: list[Any] = []
        self._labels: dict[int, object] = {}
        self._alive: list[Any] = []  # keeps ids unique
        self._arguments: tuple[Any, ...] = ()
        self._changes_argument = False
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            self._facts.append((name, self._label(tensor, name), _metadata(tensor)))

    def signature(self) -> tuple[Any, ...]:
        """All that is known of it."""
        return tuple(self._facts)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The block is called."""
        self.calls += 1
        self._facts.append(torch.is_grad_enabled())
        nested = flatten([args, kwargs])
        self._arguments = nested.leaves
        for i, (path, leaf) in enumerate(zip(nested.paths, nested.leaves, strict=True)):
            self._facts.append((path, self._argument(i, leaf)))

    def leave(self, output: Any, leaves_more: bool) -> None:
        """The block returns `output`; `leaves_more`: and has put something elsewhere."""
        nested = flatten(output)
        known = (Tensor, int, float, str, bool, type(None))
        if all(isinstance(leaf, known) for leaf in nested.leaves) and not self._changes_argument and not leaves_more:
            self.build = marker.output_like(self._arguments, output)
            given = set(map(id, self._arguments))
            self._made = [x for x in nested.leaves if isinstance(x, Tensor) and id(x) not in given]
        for path, leaf in zip(nested.paths, nested.leaves, strict=True):
            self._facts.append((path, self._encode(leaf), _metadata(leaf) if isinstance(leaf, Tensor) else None))

    def same_as(self, other: Recording) -> Any:
        """The block, just entered, is known to do what `other` did: what it returns, without running it."""
        self._facts, self.build = list(other.signature()), other.build
        if other.build is None:
            raise ValueError("only what a block returns can be repeated")
        return other.build(self._arguments, [_fresh(t) for t in other._made])

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator was called inside."""
        fact = (func, self._encode(args), self._encode(tuple(kwargs.items())))
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            owned = {storage_id(a) for a in self._arguments if isinstance(a, Tensor)}
            self._changes_argument |= storage_id(args[0]) in owned
        for i, made in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(made, Tensor):
                self._label(made, (len(self._facts), i))
        self._facts.append(fact)

    def _argument(self, i: int, leaf: Any) -> object:
        if not isinstance(leaf, Tensor):
            return self._encode(leaf)
        # What gradients do not reach (masks, positions, rotary tables) must be the very same for all of a kind.
        same = None if leaf.requires_grad else id(leaf)
        return (self._label(leaf, ("argument", i)), same, _metadata(leaf))

    def _label(self, tensor: Tensor, label: object) -> object:
        self._alive.append(tensor)
        return self._labels.setdefault(id(tensor), label)

    def _encode(self, value: Any) -> object:
        if isinstance(value, Tensor):
            self._alive.append(value)
            return self._labels.get(id(value), ("outside", id(value)))
        if isinstance(value, (tuple, list)):
            return tuple(self._encode(v) for v in value)
        if value is None or isinstance(value, (int, float, str, bool, torch.dtype, torch.device)):
            return (type(value), value)
        self._alive.append(value)
        return (type(value), id(value))


def _fresh(tensor: Tensor) -> Tensor:
    """Another tensor like that, which gradients flow to if they do there."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_().view_as(made) if tensor.requires_grad else made


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


class Recorder(TorchDispatchMode):
    """Tells the current block's recording of each call. Results of equal calls are remembered: blocks repeat them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: Recording | None = None
        self._known: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        if self.current is not None:
            self.current.note(func, args, kwargs or {}, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = (func, _hashable(args), _hashable(tuple(kwargs.items())))
        known = self._known.get(key)
        if known is not None:
            shape, stride, dtype = known
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if type(result) is Tensor and _is_fresh(func):
            self._known[key] = (tuple(result.shape), result.stride(), result.dtype)
        return result


def _is_fresh(func: Any) -> bool:
    """Whether results share no storage with operands."""
    returns = func._schema.returns
    return not func._schema.is_mutable and all(r.alias_info is None for r in returns)


def _hashable(value: Any) -> Any:
    """`value` with tensors replaced by their metadata."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    return (type(value), value)
