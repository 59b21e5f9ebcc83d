"""Timing of one local op on one device, forward and backward apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.accelerator import is_host, runtime
from autopar.graph import DeviceArg, Dtype, Operand, OpKey
from autopar.measure.profile import Sample, Timing
from autopar.shard import host  # noqa: F401 - defines an operator that is timed
from autopar.trace.run import overload

LEAST_REPEATS, MOST_REPEATS = 3, 50
SETTLING_BYTES = 31 << 20
"""Just below the largest block for which glibc raises its threshold of blocks mapped one by one (32 MiB)."""
POOL_BYTES, LARGEST_PART, ALIGNMENT = 64 << 20, 4, 64
"""Bytes that operands are parts of, so that one is used again only after all others; the share of them, 1 in so many,
that one operand may take, lest those of one call lie over each other; elements that parts begin at."""

STEP_BYTES, MOST_PARAMETERS = 32 << 20, 64
"""An optimizer step is timed over parameters of so many bytes together, but not more of them."""

HELD_BYTES = 1 << 30
"""Most bytes of results kept at once."""

FLUSH_BYTES = 256 << 20
"""Written between repeats on cuda: more than any second-level cache, which a training step would not find warm."""


WARMING_SIZE, WARMING_S = 2048, 0.3
"""Sides of the products, and seconds of them, by which a device's clocks are warmed up before the first timing."""


def time_op(key: OpKey, device: torch.device, budget_s: float = 0.015) -> Timing:
    """Run the op of `key` again and again for about `budget_s`; what can't be run is returned as failed.

    The first run warms up and is not counted. As in a training step all forward runs come first, their results kept,
    so that each allocates anew; then the backward runs, last first. The backward is `autograd.grad` for the operands
    that want a gradient, less what the engine itself takes to start.
    """
    try:
        trial = OptimizerTrial(key, device) if key.target.startswith("optimizer.") else OpTrial(key, device)
        return _timed(trial, device, budget_s)
    except Exception as error:  # whatever torch raises for an op that can't be run like this
        return Timing(failed=f"{type(error).__name__}: {error}"[:500])


def _timed(trial: Trial, device: torch.device, budget_s: float) -> Timing:
    _settle_allocator(device)
    _warm_clocks(device)
    repeats = _repeats(trial, device, budget_s)
    _run_all(trial, device, repeats)  # memory that is touched for the first time is slow, and a training step has none
    return _run_all(trial, device, repeats)


def _run_all(trial: Trial, device: torch.device, repeats: int) -> Timing:
    """All forward runs, their results kept, then the backward runs, last first."""
    forward, kept = list[float](), list[Run]()
    for _ in range(repeats):
        seconds, run = trial.forward(device)
        forward.append(seconds)
        kept.append(run)
    backward = [s for s in (trial.backward(kept.pop(), device) for _ in range(repeats)) if s is not None]
    idle_s = engine_start_s(device) if backward else 0.0
    return Timing(Sample(tuple(forward)), Sample(tuple(max(0.0, s - idle_s) for s in backward)))


@cache
def _settle_allocator(device: torch.device) -> None:
    """On the host: free one large block, after which glibc keeps freed memory instead of giving it back."""
    if is_host(device):
        torch.ones(SETTLING_BYTES, dtype=torch.uint8, device=device)


@cache
def _warm_clocks(device: torch.device) -> None:
    """Off the host: compute until the device has left the low clocks that it idles at."""
    if is_host(device):
        return
    factor, until_s = torch.ones(WARMING_SIZE, WARMING_SIZE, device=device), time.perf_counter() + WARMING_S
    while time.perf_counter() < until_s:
        clock = clock_for(device)
        torch.mm(factor, factor)
        clock()


def _repeats(trial: Trial, device: torch.device, budget_s: float) -> int:
    """How often an op runs in the budget and with its results held, judged by the second of two runs."""
    start_s, results = 0.0, list[Tensor]()
    for _ in range(2):
        start_s = time.perf_counter()
        _, run = trial.forward(device)
        trial.backward(run, device)
        results = run.results
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


class Run(NamedTuple):
    """Results of a forward, and the operands that want a gradient."""

    results: list[Tensor]
    wanted: list[Tensor]


class Trial(Protocol):
    """Something that can be run forward and backward again and again, and timed."""

    def forward(self, device: torch.device) -> tuple[float, Run]:
        """Seconds of one forward, and what its backward needs."""
        ...

    def backward(self, run: Run, device: torch.device) -> float | None:
        """Seconds of one backward; None where there is nothing to differentiate."""
        ...


class OpTrial:
    """An op that is run on new arguments each time: what a training step uses has mostly left the caches since."""

    def __init__(self, key: OpKey, device: torch.device) -> None:
        self.key, self.maker = key, _Maker(key, device)
        self.function = overload(key.target)

    def forward(self, device: torch.device) -> tuple[float, Run]:
        """Seconds of one forward; its results and the operands that want a gradient."""
        args = [self.maker.argument(a) for a in self.key.args]
        kwargs = {k: self.maker.argument(v) for k, v in self.key.kwargs}
        _flush(device)
        clock = clock_for(device)
        result = self.function(*args, **kwargs)
        seconds = clock()
        wanted = [t for t in _tensors([*args, *kwargs.values()]) if t.requires_grad]
        return seconds, Run(list(_tensors(result)), wanted)

    def backward(self, run: Run, device: torch.device) -> float | None:
        """Seconds of one backward; None where there is nothing to differentiate."""
        outputs = [t for t in run.results if t.requires_grad]
        if not (outputs and run.wanted):
            return None
        gradients = [self.maker.floats(t.shape, t.dtype) for t in outputs]
        _flush(device)
        clock = clock_for(device)
        torch.autograd.grad(outputs, run.wanted, gradients, allow_unused=True)
        return clock()


class OptimizerTrial:
    """A foreach step of torch.optim over many parameters of one size; a run's seconds are those of one of them.

    Under a job parameters are DTensors, as those of a parallel module are.
    """

    def __init__(self, key: OpKey, device: torch.device) -> None:
        _, name, _ = key.target.split(".")
        (operand,) = key.args
        if not isinstance(operand, Operand):
            raise TypeError(f"{key.target} takes the parameter as its only argument, not {operand!r}")
        parameter = torch.rand(operand.shape, dtype=getattr(torch, operand.dtype), device=device)
        count = max(1, min(MOST_PARAMETERS, STEP_BYTES // max(1, parameter.nbytes)))
        self.parameters = [nn.Parameter(_distributed(parameter.clone())) for _ in range(count)]
        for one in self.parameters:
            one.grad = _distributed(parameter.clone())
        makers: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        self.optimizer = makers[name](self.parameters, lr=1e-4, foreach=True)

    def forward(self, device: torch.device) -> tuple[float, Run]:
        """Seconds of a step for one parameter."""
        clock = clock_for(device)
        self.optimizer.step()
        return clock() / len(self.parameters), Run([], [])

    def backward(self, run: Run, device: torch.device) -> None:
        """Nothing: a step isn't differentiated."""


def _distributed(tensor: Tensor) -> Tensor:
    """`tensor` as a DTensor that every rank of the job has whole; itself without a job."""
    if not dist.is_initialized():
        return tensor
    return DTensor.from_local(tensor, init_device_mesh(tensor.device.type, (dist.get_world_size(),)), [Replicate()])


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


def release_buffers() -> None:
    """Let go of what timing keeps between operators: training has better use for the memory. Clocks cool down."""
    _warm_clocks.cache_clear()
    _pool.cache_clear()
    _flush_buffer.cache_clear()


@cache
def _pool(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.rand(POOL_BYTES // dtype.itemsize, device=device).add_(0.1).to(dtype)


@dataclass
class _Maker:
    """Makes the arguments of a key: random positive floats (roots of negative ones are slow), integers in range."""

    key: OpKey
    device: torch.device
    _start: int = 0

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
        return self.floats(operand.shape, dtype).requires_grad_(operand.requires_grad)

    def floats(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Values at the next place of the pool, from its start again after its end; a large tensor is new."""
        size = -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        pool = _pool(self.device, dtype)
        if size > pool.numel() // LARGEST_PART:
            return torch.rand(tuple(shape), device=self.device).add_(0.1).to(dtype)
        start = self._start if self._start + size <= pool.numel() else 0
        self._start = start + size
        return pool[start : start + prod(shape)].view(tuple(shape)).detach()

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
