"""This machine as a cluster: what `cluster="local"` stands for."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from autopar.cluster import Cluster, Device, Link

CPU_FLOPS_PER_S = 6e10
"""Nominal fp32 FLOP/s of a thread: two 8-wide multiply-adds a cycle near 2 GHz. Timings correct it where taken."""

CPU_BYTES_PER_S = 1e10
"""Nominal memory rate of a process."""

MEMORY_SHARE = 0.9
"""Share of a device's memory that a process is taken to be able to allocate."""

LOOPBACK = Link("loopback", 1e9, 1e-4)
"""Processes of one machine talking over gloo; nominal, as timings are taken where several processes run."""

DEVICE_LINK = Link("devices of this machine", 2e10, 1e-5)
"""cuda devices of one machine, taken to be joined by PCIe; nominal likewise."""


def local_cluster(device: torch.device, ranks: int | None = None) -> Cluster:
    """This machine with `ranks` processes (by default those of the torchrun job, else one), each on its own share.

    cpu: each process computes with its own threads, and they share the memory. cuda: a device each.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    per_node = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    model = _cuda_device(device) if device.type == "cuda" else _cpu_device(per_node)
    link = DEVICE_LINK if device.type == "cuda" else LOOPBACK
    return Cluster("local", model, ranks // per_node, per_node, link, link)


def device_name(device: torch.device) -> str:
    """What the maker calls the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _processor()


def _cpu_device(ranks: int) -> Device:
    memory_bytes = _machine_memory_bytes() // ranks
    single = CPU_FLOPS_PER_S * torch.get_num_threads()
    peak = {"float32": single, "float64": single / 2, "bfloat16": single / 4, "float16": single / 8}
    return Device(
        name=_processor(),
        backend="cpu",
        memory_bytes=memory_bytes,
        usable_bytes=int(memory_bytes * MEMORY_SHARE),
        reserve_bytes=0,
        peak_flops_per_s=peak,
        memory_bytes_per_s=CPU_BYTES_PER_S,
        efficiency=dict.fromkeys([*peak, "memory"], 1.0),
        launch_s=5e-6,
        sources=("nominal figures of a processor; timings are taken where they matter",),
    )


def _cuda_device(device: torch.device) -> Device:
    """A cuda device: a shipped one of that name where there is one, with the memory that torch sees."""
    from dataclasses import replace

    from autopar.cluster import find_device

    found = find_device(device_name(device)).device()
    memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    usable = min(found.usable_bytes, memory_bytes)
    return replace(found, name=device_name(device), memory_bytes=memory_bytes, usable_bytes=usable)


def _processor() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _machine_memory_bytes() -> int:
    """Memory of the machine, or of the container this runs in where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
