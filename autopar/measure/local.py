"""This machine as a cluster: what `cluster="local"` stands for."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from autopar.cluster import Cluster, Device, Link, all_devices

CPU_FLOPS_PER_S = 6e10
"""Nominal fp32 FLOP/s of a thread: two 8-wide multiply-adds a cycle near 2 GHz. Timings correct it where taken."""

CPU_BYTES_PER_S = 1e10
"""Nominal memory rate of a process."""

NOMINAL_CUDA = Device(
    name="cuda",
    backend="cuda",
    memory_bytes=0,
    usable_bytes=0,
    reserve_bytes=1 << 30,
    peak_flops_per_s={"bfloat16": 1e14, "float16": 1e14, "float32": 2e13, "float64": 1e12},
    memory_bytes_per_s=1e12,
    efficiency={},
    launch_s=5e-6,
    overlap=0.5,
    sources=("nominal figures of an unknown device; timings are taken where they matter",),
)
"""A cuda device that no file describes."""

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
    """The device file whose name's words all stand in the driver's, else nominal figures; memory as torch sees it."""
    name = device_name(device)
    memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    plain = name.lower().replace(" ", "")
    known = [f.device() for f in all_devices() if all(word in plain for word in f.name.split("-"))]
    found = max(known, key=lambda d: len(d.name), default=NOMINAL_CUDA)
    usable_bytes = min(found.usable_bytes, memory_bytes) if known else int(memory_bytes * MEMORY_SHARE)
    return replace(found, name=name, memory_bytes=memory_bytes, usable_bytes=usable_bytes)


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
