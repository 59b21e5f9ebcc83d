"""This machine as a cluster: what `cluster="local"` stands for."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from autopar.accelerator import runtime
from autopar.cluster import Cluster, Device, Link, find_device
from autopar.errors import ConfigError

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
"""Devices that no file describes are taken to be joined by PCIe; nominal likewise."""


def local_cluster(device: torch.device, ranks: int | None = None) -> Cluster:
    """This machine with `ranks` processes (by default those of the torchrun job, else one), each on its own share.

    cpu: each process computes with its own threads, and they share the memory. cuda: a device each.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    per_node = ranks_per_node(ranks)
    if device.type == "cuda":
        model, intra, inter = _cuda_device(device)
    else:
        model, intra, inter = _cpu_device(per_node), LOOPBACK, LOOPBACK
    return Cluster("local", model, ranks // per_node, per_node, intra, inter)


def ranks_per_node(ranks: int) -> int:
    """How many of a job's ranks torchrun has started on this node: all of them outside torchrun."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def device_name(device: torch.device) -> str:
    """What the maker calls the device."""
    if device.type == "cuda":
        return runtime().get_device_name(device)
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
        host_bytes_per_s=CPU_BYTES_PER_S,
        efficiency=dict.fromkeys([*peak, "memory"], 1.0),
        launch_s=5e-6,
        sources=("nominal figures of a processor; timings are taken where they matter",),
    )


def _cuda_device(device: torch.device) -> tuple[Device, Link, Link]:
    """The device and links of the file that knows the driver's name, else nominal ones; memory as torch sees it."""
    name = device_name(device)
    memory_bytes = int(runtime().get_device_properties(device).total_memory)
    try:
        file = find_device(name)
    except ConfigError:
        usable_bytes = int(memory_bytes * MEMORY_SHARE)
        nominal = replace(NOMINAL_CUDA, name=name, memory_bytes=memory_bytes, usable_bytes=usable_bytes)
        return nominal, DEVICE_LINK, DEVICE_LINK
    found = file.device()
    here = replace(found, name=name, memory_bytes=memory_bytes, usable_bytes=min(found.usable_bytes, memory_bytes))
    return here, file.intra.link(), file.inter.link()


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
