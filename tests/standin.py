"""A device that isn't there: what `torch.cuda` does for the code under test, done by the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


class HostEvent:
    """A mark in time, by the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.at_s, self.reached = enable_timing, 0.0, False

    def record(self, stream: list[HostEvent]) -> None:
        """Mark now, behind everything the stream has."""
        self.at_s = time.perf_counter()
        stream.append(self)

    def synchronize(self) -> None:
        """Wait until the mark is reached: the host has done everything when it asks."""
        self.reached = True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds to a later mark; as on a device only between timed marks, and once the end is reached."""
        if not (self.timed and end.timed and end.reached):
            raise RuntimeError("elapsed_time before both events are timed and reached")
        return (end.at_s - self.at_s) * 1e3


@dataclass
class StandIn:
    """`devices` equal devices of a name and memory; bytes are counted as they are told."""

    name: str = "NVIDIA H200"
    devices: int = 4
    memory_bytes: int = 150_000_000_000
    current: torch.device | None = None
    allocated_bytes: int = 0
    peak_bytes: int = 0
    streams: dict[str, list[HostEvent]] = field(default_factory=dict)
    Event: Any = HostEvent

    def is_available(self) -> bool:
        """It is there as long as it stands in."""
        return True

    def device_count(self) -> int:
        """How many there are."""
        return self.devices

    def set_device(self, device: torch.device) -> None:
        """Remember the current device."""
        self.current = device

    def current_stream(self, device: torch.device) -> list[HostEvent]:
        """The one stream of a device: the marks put on it."""
        return self.streams.setdefault(str(device), [])

    def get_device_name(self, device: torch.device) -> str:  # noqa: ARG002 - all alike
        """The name."""
        return self.name

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:  # noqa: ARG002 - all alike
        """The memory."""
        return SimpleNamespace(total_memory=self.memory_bytes)

    def allocate(self, size_bytes: int) -> None:
        """Take bytes, or give back a negative number."""
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def reset_peak_memory_stats(self, device: torch.device) -> None:  # noqa: ARG002 - all alike
        """The peak starts from now."""
        self.peak_bytes = self.allocated_bytes

    def max_memory_allocated(self, device: torch.device) -> int:  # noqa: ARG002 - all alike
        """The peak."""
        return self.peak_bytes
