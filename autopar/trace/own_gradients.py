"""Gradients that are not the derivative of what forward computes: those of `autograd.Function` and of hooks.

A trace sees the operators inside a function's forward, and autograd then takes their derivative. Where a function says
something else (a reversed or straight-through gradient) the submodule that calls it must stand as one operator. Which
do is found by running the function on random values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.trace.torch_private import MODULE_HOOK, functions_seen, hint_of, off_the_record

_ROUNDING = 1e-4
"""Of the largest element: what float32 may round, and far less than a gradient of another function is off."""
_LARGEST = 1 << 20
"""Elements of the largest tensor that a function is tried on as it is; longer dims are cut."""
_CUT = 64


class OwnGradientError(Exception):
    """Something has a gradient that a trace would lose."""


@contextmanager
def gradients_kept() -> Iterator[None]:
    """Inside, a function on tensors without data whose gradient would get lost raises OwnGradientError."""
    known: dict[object, bool] = {}

    def see(cls: Any, args: Sequence[Any]) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not (any(t.is_meta for t in tensors) and any(t.requires_grad for t in tensors) and torch.is_grad_enabled()):
            return
        if cls is MODULE_HOOK:
            raise OwnGradientError("a hook may change the gradient that passes this module")
        if cls.__module__.startswith("torch."):
            return
        key = (cls, *map(_fact, args))
        if key not in known:
            known[key] = _is_usual(cls, args)
        if not known[key]:
            raise OwnGradientError(f"the gradient of {cls.__name__} is not the derivative of its forward")

    with functions_seen(see):
        yield


def _fact(argument: Any) -> object:
    if isinstance(argument, Tensor):
        return (tuple(map(hint_of, argument.shape)), argument.dtype, argument.requires_grad)
    return argument if isinstance(argument, (bool, int, float, str)) else id(argument)


def _is_usual(cls: Any, args: Sequence[Any]) -> bool:
    """Whether gradients through the function are those through the operators of its forward."""
    with off_the_record(), torch.random.fork_rng([]), torch.enable_grad():
        torch.manual_seed(0)
        given = [_random(a) if isinstance(a, Tensor) else a for a in args]
        try:
            said, derived = (_gradients(call, given) for call in (cls.apply, lambda *own: _forward(cls, own)))
        except Exception:  # the function's own: whatever it is, nothing is proved
            return False
        return all(map(_alike, said, derived))


def _alike(said: Tensor, derived: Tensor) -> bool:
    """Equal but for rounding, that of float32 where the function computes in it."""
    largest = float(derived.nan_to_num().abs().max()) if derived.numel() else 0.0  # a root of less than 0 is nan
    return torch.allclose(said, derived, rtol=1e-6, atol=1e-9 + _ROUNDING * largest)


def _random(like: Tensor) -> Tensor:
    shape = [hint_of(size) for size in like.shape]
    if torch.Size(shape).numel() > _LARGEST:
        shape = [min(size, _CUT) for size in shape]
    if not like.is_floating_point():
        return torch.zeros(shape, dtype=like.dtype)
    return torch.randn(shape, dtype=torch.float64).requires_grad_(like.requires_grad)


def _gradients(call: Any, given: Sequence[Any]) -> list[Tensor]:
    """Of a random sum of all results, with respect to every operand that wants one."""
    own = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given]
    made = call(*(x.clone() if isinstance(x, Tensor) else x for x in own))  # which forward may change in place
    results = [r for r in (made if isinstance(made, tuple) else (made,)) if isinstance(r, Tensor) and r.requires_grad]
    leaves = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
    torch.manual_seed(1)
    weights = [torch.randn(r.shape, dtype=r.dtype) for r in results]
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True) if results else (None,) * len(leaves)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _forward(cls: Any, args: Sequence[Any]) -> Any:
    """What forward computes, as plain operators."""
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*args)
    return cls.forward(_Context([isinstance(a, Tensor) and a.requires_grad for a in args]), *args)


class _Context:
    """Takes what a forward leaves for its backward."""

    def __init__(self, needs_input_grad: list[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)

    def save_for_backward(self, *_: Any) -> None:
        """Kept by nobody."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward
