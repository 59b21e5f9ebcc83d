"""What a submodule does to its inputs, found by running it: shapes, whether samples stay apart, work, saved bytes.

It runs on the host with random parameters, at two samples and at parts of them, once for each kind of input. Of rows
merged with the batch only a few are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.graph import Extent, TensorSpec
from autopar.trace.nested import Nested, flatten
from autopar.trace.opaque.values import DRAWS, Draw, real
from autopar.trace.torch_private import off_the_record

ROWS = 4
"""How many of the rows of a sample are tried where the batch is merged with others."""
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""The dtypes that are tried, and the largest relative difference between samples together and apart."""


class UnfitError(Exception):
    """A submodule that can't be one operator either; the text says why."""


@dataclass(frozen=True)
class Learned:
    """What was found of a submodule at inputs of some kind.

    `results` are specs of the tensors it returns and `output` how it returns them; the rest is as in `Form`.
    """

    results: tuple[TensorSpec, ...]
    output: Nested
    apart: bool
    draws: bool
    flops: float
    saved_bytes: int


Call = Callable[[nn.Module, Sequence[Tensor]], Any]
"""(module, tensor arguments) -> what it returns."""


def learn(module: nn.Module, call: Call, inputs: tuple[TensorSpec, ...], compute: str) -> Learned:
    """Run `module` (on meta; its real values are not needed) on random inputs of these kinds.

    `compute` is the dtype of what runs in float64 here, or in float32 where there are kernels for no more. Raises
    UnfitError on what can't be one operator.
    """
    with off_the_record(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        problem: Exception | None = None
        for dtype, draw in product(CLOSE, DRAWS):
            torch.manual_seed(0)
            try:
                found = _Trial(module, call, inputs, compute, dtype, draw).learned()
                # numbers that are all alike don't show what they do
                return found if draw is not DRAWS[-1] else replace(found, apart=False)
            except UnfitError:
                raise
            except Exception as error:  # the module's own
                problem = error.with_traceback(None)  # which would keep its tensors
        raise UnfitError(f"it can't be run on random values ({type(problem).__name__}: {problem})") from problem


class _Trial:
    def __init__(
        self,
        module: nn.Module,
        call: Call,
        inputs: tuple[TensorSpec, ...],
        compute: str,
        dtype: torch.dtype,
        draw: Draw,
    ) -> None:
        self.module, self.call, self.inputs, self.compute = real(module, dtype), call, inputs, compute
        self.dtype = dtype
        self.draw = draw
        merged = {e.per_sample for spec in inputs for e in spec.shape if e.is_batch}
        self.per_sample = merged.pop() if len(merged) == 1 else 1
        self.rows = min(self.per_sample, ROWS) if not merged else 1
        self.batched = any(spec.batch_dim is not None for spec in inputs)
        if any(e.is_batch and e.fixed for spec in inputs for e in spec.shape):
            raise UnfitError("a dim of its inputs is the batch and more")

    def learned(self) -> Learned:
        whole = self._given(2)
        kept = [t.detach().clone() for t in (*whole, *self.module.buffers())]
        output, flops, saved = self._measured(whole)
        if not all(map(torch.equal, kept, (*whole, *self.module.buffers()))):
            raise UnfitError("it changes a buffer or an argument")
        tensors = _tensors(output)
        again = _tensors(self._run(whole, seed=1))
        draws = not all(map(_close, tensors, again))
        apart, shapes = self._parts(whole, tensors)
        specs = tuple(
            TensorSpec(shape, self._dtype(t), t.requires_grad) for shape, t in zip(shapes, tensors, strict=True)
        )
        scale = self.per_sample / self.rows / (2 if self.batched else 1)
        return Learned(specs, _without_tensors(output), apart and not draws, draws, flops * scale, int(saved * scale))

    def _run(self, inputs: Sequence[Tensor], seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return self.call(self.module, inputs)

    def _measured(self, inputs: list[Tensor]) -> tuple[Any, float, int]:
        """Its output, FLOPs of the forward pass, and bytes that autograd keeps beside parameters and arguments."""
        own = {t.untyped_storage().data_ptr() for t in (*self.module.parameters(), *self.module.buffers(), *inputs)}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                width = _width(self.compute) / tensor.element_size() if tensor.dtype == self.dtype else 1
                kept[storage.data_ptr()] = int(storage.nbytes() * width)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), _counter() as counter:
            output = self._run(inputs)
        return output, float(counter.get_total_flops()), sum(kept.values())

    def _parts(self, whole: list[Tensor], tensors: list[Tensor]) -> tuple[bool, list[tuple[Extent, ...]]]:
        """Whether the first row (or sample) and the others alone give what all together do, and shapes by sample."""
        if not self.batched:
            return False, [tuple(Extent(0, n) for n in t.shape) for t in tensors]
        try:
            first, others = (_tensors(self._run(self._cut(whole, start, end))) for start, end in ((0, 1), (1, None)))
        except Exception:  # the module's own: what one asks for is in another
            more = _tensors(self._run(self._given(3)))
            return False, [self._shape(t, a, 2 * self.rows, 3 * self.rows) for t, a in zip(tensors, more, strict=True)]
        shapes = [self._shape(a, t, 1, 2 * self.rows) for a, t in zip(first, tensors, strict=True)]
        apart = True
        for shape, a, b, t in zip(shapes, first, others, tensors, strict=True):
            dims = [d for d, e in enumerate(shape) if e.is_batch]
            apart = apart and len(dims) == 1 and _close(torch.cat((a, b), dims[0]), t)
        return apart, shapes

    def _cut(self, whole: list[Tensor], start: int, end: int | None) -> list[Tensor]:
        dims = [spec.batch_dim for spec in self.inputs]
        return [t if d is None else _sliced(t, d, start, end) for t, d in zip(whole, dims, strict=True)]

    def _shape(self, few: Tensor, many: Tensor, rows: int, more: int) -> tuple[Extent, ...]:
        """The shape of what is `few` at so many `rows`, and `many` at more."""
        return tuple(self._extent(a, b, rows, more) for a, b in zip(few.shape, many.shape, strict=True))

    def _extent(self, few: int, many: int, rows: int, more: int) -> Extent:
        slope, rest = divmod(many - few, more - rows)
        if rest:
            raise UnfitError("a dim of what it returns does not grow evenly with the batch")
        return Extent(slope * self.per_sample, few - slope * rows)

    def _given(self, samples: int) -> list[Tensor]:
        """Arguments for so many samples."""
        return [self._tensor(spec, samples) for spec in self.inputs]

    def _tensor(self, spec: TensorSpec, samples: int) -> Tensor:
        shape = [samples * self.rows if e.is_batch and self._is_few(e) else e.at(samples) for e in spec.shape]
        if "float" in spec.dtype:
            value = torch.randn(shape, dtype=self.dtype)
            value = value if spec.dtype == self.compute else value.to(getattr(torch, spec.dtype))
            return value.requires_grad_(spec.requires_grad)
        if spec.dtype == "bool":
            return torch.ones(shape, dtype=torch.bool)
        return self.draw(shape).to(getattr(torch, spec.dtype))

    def _is_few(self, extent: Extent) -> bool:
        return extent.per_sample == self.per_sample

    def _dtype(self, tensor: Tensor) -> str:
        return self.compute if tensor.dtype == self.dtype else str(tensor.dtype).removeprefix("torch.")


def _counter() -> FlopCounterMode:
    """Counts FLOPs, those of grouped products too: each row meets one of the matrices."""

    def grouped(rows: list[int], matrices: list[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(rows) * matrices[-1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})


def _sliced(tensor: Tensor, dim: int, start: int, end: int | None) -> Tensor:
    return tensor.detach().narrow(dim, start, (tensor.shape[dim] if end is None else end) - start)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(output).leaves if isinstance(leaf, Tensor)]


def _without_tensors(output: Any) -> Nested:
    """The structure of what was returned, a placeholder for each tensor."""
    nested = flatten(output)
    return flatten(nested.rebuild([RESULT if isinstance(leaf, Tensor) else leaf for leaf in nested.leaves]))


class _Result:
    """Stands for a tensor that is returned."""


RESULT = _Result()


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    largest = float(b.detach().abs().max()) if b.numel() else 0.0
    close = CLOSE.get(a.dtype, max(CLOSE.values()))
    return bool((a - b).detach().abs().max() <= close * largest) if a.numel() else True


def _width(dtype: str) -> int:
    return int(torch.empty((), dtype=getattr(torch, dtype)).element_size())
