"""What forward computes from numbers alone is known while it is traced on tensors without data.

Masks, positions and small tables don't depend on the inputs. They are computed beside the trace, so that forward may
ask what they are (`if mask.all()`), and numbers given to `torch.tensor` or as a list of indices don't get lost on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.trace.known.instead import INSTEAD
from autopar.trace.own_gradients import OwnGradientError
from autopar.trace.torch_private import CONSTRUCTORS, off_the_record

SPELLED_OUT = 64
"""How many numbers of a literal may become operators."""
LARGEST = 1 << 22
"""Elements of the largest tensor that is computed."""

_LITERALS = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_FACTORIES = (
    torch.full, torch.ones, torch.zeros, torch.arange, torch.linspace, torch.eye, torch.tril_indices,
    torch.triu_indices, torch.hann_window,
)  # fmt: skip
_ASKING = (
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, torch.equal,
    torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero,
)  # fmt: skip
_NUMBERED = (torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip, Tensor.clip_)
"""Calls that ask a tensor without dims among their numbers for its value, beside the trace."""
_METADATA = frozenset((
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__, Tensor.layout.__get__, Tensor.stride, Tensor.untyped_storage,  # type: ignore[attr-defined]
))  # fmt: skip
"""Questions that no value answers."""
_RANDOM = (torch.rand_like, torch.randn_like, torch.bernoulli, torch.multinomial, torch.empty_like, Tensor.new_empty)


class Known(TorchFunctionMode):
    """Inside, tensors made from numbers alone carry their values, and questions about them are answered."""

    def __init__(self) -> None:
        super().__init__()
        self._traced: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._values: dict[int, Tensor] = {}
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or what stands for it."""
        if func in _METADATA:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func is Tensor.register_hook and args[0].is_meta:
            raise OwnGradientError("a hook may change the gradient of a tensor")
        if func in _LITERALS and len(args) == 1:  # wherever it is put, what it meets is on meta
            made = self._literal(args[0], kwargs.get("dtype"))
            return func(*args, **kwargs) if made is None else made
        if func in CONSTRUCTORS and func not in _LITERALS and torch.compiler.is_exporting():
            kwargs = {**kwargs, "device": "meta"}  # wherever it says, or nowhere: the plan puts it with all else
        if torch.compiler.is_exporting():
            func = INSTEAD.get(func, func)
        if torch.compiler.is_exporting() and any(
            isinstance(a, Tensor) and a.is_meta for a in (*args, *kwargs.values())
        ):
            args, kwargs = tuple(map(self._brought, args)), {k: self._brought(v) for k, v in kwargs.items()}
        if func in _INDEXING and args[0].is_meta:
            args = (args[0], self._index(args[1]), *args[2:])
        if func in _NUMBERED:
            args, kwargs = (args[0], *map(self._number, args[1:])), {k: self._number(v) for k, v in kwargs.items()}
        values = self._valued((args, kwargs)) if _may_be_known(func, args) else None
        if values is not None and func in _ASKING:
            with off_the_record():
                return func(*values[0], **values[1])
        result = func(*args, **kwargs)
        if values is not None:
            self._remember(func, values, result)
        return result

    # --- values -------------------------------------------------------------------------------------------------------

    def _valued(self, data: Any) -> Any:
        """`data` with the value of every tensor in its place, devices as cpu; None if one isn't known."""
        try:
            return self._replaced(data)
        except _Unknown:
            return None

    def _replaced(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            if self._traced.get(id(data)) is not data:
                raise _Unknown
            return self._values[id(data)]
        if isinstance(data, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)):
            raise _Unknown
        if type(data) in (tuple, list):
            return type(data)(map(self._replaced, data))
        if isinstance(data, torch.Size):
            return torch.Size(map(self._replaced, data))
        if type(data) is dict:
            return {key: self._replaced(value) for key, value in data.items()}
        if isinstance(data, slice):
            return slice(*map(self._replaced, (data.start, data.stop, data.step)))
        return torch.device("cpu") if isinstance(data, torch.device) or data == "meta" else data

    def _remember(self, func: Any, values: Any, result: Any) -> None:
        """Compute beside what was traced."""
        traced = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [t for t in traced if isinstance(t, Tensor)]
        if not tensors or any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape):
            return
        if any(t.numel() > LARGEST for t in tensors):
            return
        try:
            with off_the_record():
                computed = func(*values[0], **values[1])
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            return
        beside = computed if isinstance(computed, (tuple, list)) else (computed,)
        for mine, value in zip(traced, beside, strict=False):
            if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
                self._know(mine, value)

    def _know(self, traced: Tensor, value: Tensor) -> None:
        self._traced[id(traced)] = traced
        self._values[id(traced)] = value

    def _number(self, data: Any) -> Any:
        """The number that a tensor without dims holds, where it is known."""
        if isinstance(data, Tensor) and not data.dim() and self._traced.get(id(data)) is data:
            with off_the_record():
                return self._values[id(data)].item()
        return data

    # --- literals -----------------------------------------------------------------------------------------------------

    def _literal(self, data: Any, dtype: torch.dtype | None) -> Tensor | None:
        """The tensor of `data` as ops that make it; None if it isn't a few numbers."""
        if not _spelled_out(data):
            return None
        with off_the_record():
            value = torch.tensor(data, dtype=dtype)
            numbers = value.tolist()
        if value.numel() > SPELLED_OUT:
            return None
        made = _filled(numbers, lambda number: torch.full((), number, dtype=value.dtype, device="meta"))
        self._know(made, value)
        return made

    def _brought(self, data: Any) -> Any:
        """A small tensor that forward or the loss brings along, with data, as ops that make it; else `data`."""
        if type(data) is not Tensor or data.is_meta or data.requires_grad or data.is_complex():
            return data
        made: Tensor | None = self._made.get(data)
        if made is None and 0 < data.numel() <= SPELLED_OUT:
            with off_the_record():
                numbers = data.tolist()
            made = self._made[data] = self._literal(numbers, data.dtype)
        return data if made is None else made

    def _index(self, given: Any) -> Any:
        """An index with its lists as tensors, lists of one number (which keep their dim) as slices."""
        if isinstance(given, tuple):
            alone = sum(isinstance(part, (list, Tensor)) for part in given) == 1
            return tuple(_slice(part) if alone and _is_one(part) else self._index(part) for part in given)
        made = self._literal(given, None) if isinstance(given, list) else None
        return given if made is None else made


class _Unknown(Exception):
    """A value that depends on data or on the batch."""


def _may_be_known(func: Any, args: Any) -> bool:
    """Whether the call makes its result from its tensors, or from numbers, alone."""
    return func in _FACTORIES or (func not in _RANDOM and _has_tensor(args))


def _has_tensor(data: Any) -> bool:
    if isinstance(data, (tuple, list)):
        return any(map(_has_tensor, data))
    return isinstance(data, Tensor)


def _spelled_out(data: object) -> bool:
    if isinstance(data, (list, tuple)):
        return bool(data) and all(map(_spelled_out, data))
    return type(data) in (bool, int, float)


def _filled(data: Any, fill: Callable[[Any], Tensor]) -> Tensor:
    if isinstance(data, Sequence):
        return torch.stack([_filled(part, fill) for part in data])
    return fill(data)


def _is_one(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 1 and type(part[0]) is int


def _slice(part: list[int]) -> slice:
    return slice(part[0], part[0] + 1 or None)
