"""How many bytes of tensors a piece of code holds at most."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.accelerator import is_host, runtime
from autopar.emit.build import emit
from autopar.emit.example import random_batch
from autopar.graph import OpGraph
from autopar.plan import PlanRecord

PAUSE_S = 0.0005
SENDING = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operators that communicate."""


def measured_peak_tensor_bytes(function: Callable[[], object], device: torch.device | str) -> int:
    """Most bytes of tensors allocated on `device` at any moment of `function()`, what is alive before included.

    On cuda what the caching allocator has handed out; on cpu the profiler's record of every allocation, resized
    storages too, on top of the tensors that are alive in this process. What gloo's threads alone hold once a collective
    has ended is left out: how soon they let go of it depends on what else the machine does.
    """
    device = torch.device(device)
    if not is_host(device):
        runtime().reset_peak_memory_stats(device)
        function()
        return runtime().max_memory_allocated(device)
    before = live_tensor_bytes(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, _Unhurried():
        function()
    return before + highest_bytes(_changes(record), _storages(device))


def step_peak_tensor_bytes(record: PlanRecord, graph: OpGraph, module: nn.Module, examples: Sequence[Tensor]) -> int:
    """Most bytes of tensors that a training step of the plan with AdamW holds on this rank, from the second step on.

    The batch is random, like `examples` (`random_batch`). Collective over the job, on cpu.
    """
    before = live_tensor_bytes("cpu")
    pm = emit(record, graph, module, device="cpu")
    rows = len(pm.data_parallel_rows() or ())
    batch = dict(zip(graph.inputs, random_batch(graph, examples, rows, 0, torch.device("cpu")), strict=True))
    optimizer = torch.optim.AdamW(pm.parameters(), foreach=True)

    def step() -> None:
        pm.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return measured_peak_tensor_bytes(step, "cpu") - before


def live_tensor_bytes(device: torch.device | str) -> int:
    """Bytes of the storages of all tensors that Python knows of on `device`."""
    return sum(_storages(device).values())


def _storages(device: torch.device | str) -> dict[int, int]:
    """Bytes of those storages by address."""
    gc.collect()
    kind = torch.device(device).type
    plain = (t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.device.type == kind}


class _Unhurried(TorchDispatchMode):
    """Pauses between a collective and the operator after it, so that gloo's threads let go before this one does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._sent:
            time.sleep(PAUSE_S)
        self._sent = function.namespace in SENDING
        return function(*args, **(kwargs or {}))


class Change(NamedTuple):
    """An allocation (`size` > 0) or release (< 0) of bytes at an address."""

    address: int
    size: int


def _changes(record: Any) -> list[Change]:
    """What the profiler saw, in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"]))
    return [Change(int(e["args"]["Addr"]), int(e["args"]["Bytes"])) for e in memory]


def highest_bytes(changes: Sequence[Change], alive: Collection[int] = ()) -> int:
    """The most that is held, above what is held at the start; `alive` are addresses of what is left at the end.

    Releases by other threads are not on record. What is neither released nor left was a collective's own buffer: it
    counts up to the next change, until which this thread waited for the collective.
    """
    released: set[int] = set()  # addresses whose next change is a release, or that are left at the end
    released.update(alive)
    lost = [0] * len(changes)
    for i in reversed(range(len(changes))):
        address, size = changes[i]
        if size < 0:
            released.add(address)
        elif address in released:
            released.discard(address)
        else:
            lost[i] = size
    held = highest = 0
    for change, gone in zip(changes, lost, strict=True):
        held += change.size
        highest = max(highest, held)
        held -= gone
    return highest
