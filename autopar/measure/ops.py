"""Timing of one local op on one device, forward and backward apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.accelerator import is_host, runtime
from autopar.graph import DeviceArg, Dtype, Operand, OpKey
from autopar.measure.profile import Sample, Timing

LEAST_REPEATS, MOST_REPEATS = 3, 50
SETTLING_BYTES = 31 << 20
"""Just below the largest block for which glibc raises its threshold of blocks mapped one by one (32 MiB)."""
HELD_BYTES = 1 << 30
"""Most bytes of results kept at once."""

FLUSH_BYTES = 256 << 20
"""Written between repeats on cuda: more than any second-level cache, which a training step would not find warm."""


def time_op(key: OpKey, device: torch.device, budget_s: float = 0.015) -> Timing:
    """Run the op of `key` again and again for about `budget_s`; what can't be run is returned as failed.

    The first run warms up and is not counted. As in a training step all forward runs come first, their results kept,
    so that each allocates anew; then the backward runs, last first. The backward is `autograd.grad` for the operands
    that want a gradient, less what the engine itself takes to start.
    """
    try:
        return _timed(_Trial(key, device), device, budget_s)
    except Exception as error:  # whatever torch raises for an op that can't be run like this
        return Timing(failed=f"{type(error).__name__}: {error}"[:500])


def _timed(trial: _Trial, device: torch.device, budget_s: float) -> Timing:
    _settle_allocator(device)
    repeats = _repeats(trial, device, budget_s)
    _run_all(trial, device, repeats)  # memory that is touched for the first time is slow, and a training step has none
    return _run_all(trial, device, repeats)


def _run_all(trial: _Trial, device: torch.device, repeats: int) -> Timing:
    """All forward runs, their results kept, then the backward runs, last first."""
    forward, kept = list[float](), list[list[Tensor]]()
    for _ in range(repeats):
        seconds, results = trial.forward(device)
        forward.append(seconds)
        kept.append(results)
    backward = [s for s in (trial.backward(kept.pop(), device) for _ in range(repeats)) if s is not None]
    idle_s = engine_start_s(device) if backward else 0.0
    return Timing(Sample(tuple(forward)), Sample(tuple(max(0.0, s - idle_s) for s in backward)))


@cache
def _settle_allocator(device: torch.device) -> None:
    """On the host: free one large block, after which glibc keeps freed memory instead of giving it back."""
    if is_host(device):
        torch.ones(SETTLING_BYTES, dtype=torch.uint8, device=device)


def _repeats(trial: _Trial, device: torch.device, budget_s: float) -> int:
    """How often an op runs in the budget and with its results held, judged by the second of two runs."""
    start_s, results = 0.0, list[Tensor]()
    for _ in range(2):
        start_s = time.perf_counter()
        _, results = trial.forward(device)
        trial.backward(results, device)
    by_time = budget_s / max(time.perf_counter() - start_s, 1e-9)
    by_memory = HELD_BYTES / max(1, sum(t.nbytes for t in results))
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(min(by_time, by_memory))))


@cache
def engine_start_s(device: torch.device) -> float:
    """Seconds that `autograd.grad` takes when there is next to nothing to differentiate: paid once a backward pass."""
    x = torch.zeros(1, device=device, requires_grad=True)
    gradient = torch.zeros(1, device=device)
    seconds = []
    for _ in range(20):
        y = x.view(1)
        clock = clock_for(device)
        torch.autograd.grad([y], [x], [gradient])
        seconds.append(clock())
    return sorted(seconds)[len(seconds) // 2]


def clock_for(device: torch.device) -> Callable[[], float]:
    """Start timing on `device`; calling the result stops and returns seconds: by the host's clock, or cuda events."""
    if is_host(device):
        start_s = time.perf_counter()
        return lambda: time.perf_counter() - start_s
    cuda = runtime()
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record(cuda.current_stream(device))

    def stop() -> float:
        end.record(cuda.current_stream(device))
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return stop


class _Trial:
    """An op with its arguments made, ready to be run."""

    def __init__(self, key: OpKey, device: torch.device) -> None:
        namespace, name, overload = key.target.split(".")
        self.function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        maker = _Maker(key, device)
        self.args = [maker.argument(a) for a in key.args]
        self.kwargs = {k: maker.argument(v) for k, v in key.kwargs}
        self.wanted = [t for t in _tensors([*self.args, *self.kwargs.values()]) if t.requires_grad]
        self.gradients: list[Tensor] | None = None

    def forward(self, device: torch.device) -> tuple[float, list[Tensor]]:
        """Seconds of one forward, and its results."""
        _flush(device)
        clock = clock_for(device)
        result = self.function(*self.args, **self.kwargs)
        seconds = clock()
        return seconds, list(_tensors(result))

    def backward(self, results: list[Tensor], device: torch.device) -> float | None:
        """Seconds of one backward; None where there is nothing to differentiate."""
        outputs = [t for t in results if t.requires_grad]
        if not (outputs and self.wanted):
            return None
        if self.gradients is None:
            self.gradients = [torch.rand_like(t, memory_format=torch.contiguous_format) for t in outputs]
        _flush(device)
        clock = clock_for(device)
        torch.autograd.grad(outputs, self.wanted, self.gradients, allow_unused=True)
        return clock()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@cache
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def _flush(device: torch.device) -> None:
    if not is_host(device):
        _flush_buffer(device).zero_()


@dataclass(frozen=True)
class _Maker:
    """Makes the arguments of a key: random positive floats (roots of negative ones are slow), integers in range."""

    key: OpKey
    device: torch.device

    def argument(self, value: object) -> Any:
        """The argument that stands for `value` of the key."""
        if isinstance(value, Operand):
            return self.tensor(value)
        if isinstance(value, Dtype):
            return getattr(torch, value.name)
        if isinstance(value, DeviceArg):
            return self.device
        return [self.argument(v) for v in value] if isinstance(value, tuple) else value

    def tensor(self, operand: Operand) -> Tensor:
        """A tensor of the operand's shape and dtype."""
        dtype = getattr(torch, operand.dtype)
        if dtype == torch.bool:
            return torch.rand(operand.shape, device=self.device) < 0.5
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.randint(0, self.largest_index(), operand.shape, dtype=dtype, device=self.device)
        made = torch.rand(operand.shape, device=self.device).add_(0.1).to(dtype)
        return made.requires_grad_(operand.requires_grad)

    def largest_index(self) -> int:
        """One more than the largest integer that is a valid index, class or row for the op."""
        first = next((a for a in self.key.args if isinstance(a, Operand)), None)
        if first is None or not first.shape:
            return 2
        name = self.key.target.split(".")[1]
        if name == "embedding":
            return first.shape[0]
        if name in ("cross_entropy_loss", "nll_loss"):
            return first.shape[min(1, len(first.shape) - 1)]
        if name in ("gather", "index_select", "scatter", "index_add") and isinstance(self.key.args[1], int):
            return first.shape[self.key.args[1]]
        return max(1, min(first.shape, default=1))
