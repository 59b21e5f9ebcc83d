"""How many bytes of tensors a piece of code holds at most."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autopar.accelerator import is_host, runtime


def measured_peak_tensor_bytes(function: Callable[[], object], device: torch.device | str) -> int:
    """Most bytes of tensors allocated on `device` at any moment of `function()`, what is alive before included.

    On cuda what the caching allocator has handed out; on cpu the profiler's record of every allocation, resized
    storages too, on top of the tensors that are alive in this process.
    """
    device = torch.device(device)
    if not is_host(device):
        runtime().reset_peak_memory_stats(device)
        function()
        return runtime().max_memory_allocated(device)
    before = live_tensor_bytes(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    return before + _highest(_allocations(record))


def live_tensor_bytes(device: torch.device | str) -> int:
    """Bytes of the storages of all tensors that Python knows of on `device`."""
    gc.collect()
    kind = torch.device(device).type
    plain = (t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.device.type == kind}
    return sum(storages.values())


def _allocations(record: Any) -> list[int]:
    """Bytes of each allocation (positive) and release (negative), in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]"]
    return [int(e["args"]["Bytes"]) for e in sorted(memory, key=lambda e: float(e["ts"]))]


def _highest(changes: list[int]) -> int:
    held = highest = 0
    for change in changes:
        held += change
        highest = max(highest, held)
    return highest
