"""Values that are made again in the backward pass by whoever wants them first: light recomputation.

A region of a layer keeps its inputs alone. Inside `making_again` a result of a region that an operation would keep for
its backward is not kept: what unpacks it there has the region run again, once for all of its results and for its own
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

Code: TypeAlias = Callable[..., tuple[Tensor, ...]]
Inputs: TypeAlias = Sequence[Tensor | None]
Joined: TypeAlias = tuple[Inputs, tuple[Tensor, ...]]


class _Run:
    """One run of a region in a forward pass, and what has been made again of it.

    `waiting` counts those who still want a result; `inputs` gives what it was run with.
    """

    def __init__(self, code: Code) -> None:
        self.code, self.waiting, self.ended = code, 0, False
        self.inputs: Callable[[], Inputs] = tuple
        self._joined: Joined | None = None
        self._results: tuple[Tensor, ...] | None = None

    def joined(self) -> Joined:
        """The inputs anew and the results made of them, joined by a graph of their own; the same until the end."""
        if self._joined is None:
            inputs = [_anew(tensor) for tensor in self.inputs()]
            with torch.enable_grad():
                self._joined = inputs, self.code(*inputs)
            self._results = tuple(result.detach() for result in self._joined[1])
        return self._joined

    def result(self, number: int) -> Tensor:
        """A result, for one who wanted it."""
        self.waiting -= 1
        if self._results is None:
            self.joined()
        made = (self._results or ())[number]
        self._let_go()
        return made

    def end(self) -> None:
        """Its own backward pass is over."""
        self._joined, self.ended = None, True
        self._let_go()

    def _let_go(self) -> None:
        if self.ended and self.waiting <= 0:
            self._joined = self._results = None


class _Result(NamedTuple):
    """A view of a result of a run, in place of the tensor that would be kept."""

    run: _Run
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def made_again(code: Code, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """What `code` makes of `inputs`, which alone are kept for its backward pass."""
    run = _Run(code)
    results: tuple[Tensor, ...] = _Region.apply(run, *inputs)  # type: ignore[no-untyped-call]
    for number, result in enumerate(results):
        result.made_in = run, number  # type: ignore[attr-defined]
    return results


def making_again() -> AbstractContextManager[None]:
    """Inside, nobody keeps results of `made_again`."""
    return torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked)


def _packed(tensor: Tensor) -> Tensor | _Result:
    """What is kept in place of a tensor."""
    whole = tensor if tensor._base is None else tensor._base
    made_in: tuple[_Run, int] | None = getattr(whole, "made_in", None)
    if made_in is None or tensor.dtype != whole.dtype:
        return tensor if tensor.is_leaf else tensor.detach()  # an operation that kept its own result would keep itself
    run, number = made_in
    run.waiting += 1
    return _Result(run, number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _unpacked(kept: Tensor | _Result) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.run.result(kept.number).as_strided(kept.size, kept.stride, kept.offset)


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):
            node: Callable[[], Any] = ref(ctx)  # the graph holds it as long as there is a backward pass to come
            run.inputs = lambda: node().saved_tensors
            ctx.save_for_backward(*inputs)
        else:
            kept = [None if tensor is None else _packed(tensor) for tensor in inputs]
            run.inputs = lambda: [None if one is None else _unpacked(one) for one in kept]
        results = tuple(_alone(result) for result in run.code(*inputs))
        ctx.mark_non_differentiable(*(r for r in results if not (r.is_floating_point() or r.is_complex())))
        return results

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, results = ctx.run.joined()
        pairs = [(r, g) for r, g in zip(results, arriving, strict=True) if g is not None and r.requires_grad]
        wanting = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        ends, gradients = [r for r, _ in pairs], [g for _, g in pairs]
        made = torch.autograd.grad(ends, wanting, gradients, allow_unused=True) if pairs else (None,) * len(wanting)
        ctx.run.end()
        found = iter(made)
        return None, *(next(found) if any(tensor is one for one in wanting) else None for tensor in inputs)


def _anew(tensor: Tensor | None) -> Tensor | None:
    """The same data as the start of a graph."""
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


def _alone(tensor: Tensor) -> Tensor:
    """The same storage as a tensor that is no view of another one."""
    if tensor._base is None:
        return tensor
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
