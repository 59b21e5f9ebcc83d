"""The one place where code meets the accelerator's runtime: `torch.cuda`, or a stand-in where there is no device.

Everything that is asked of the runtime goes through `runtime()`, so that the branches for devices can be run on a
machine without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Runtime(Protocol):
    """What of `torch.cuda` is used here, under its names there."""

    Event: Any

    def is_available(self) -> bool:
        """Whether there is a device that torch can use."""
        ...

    def device_count(self) -> int:
        """Devices that this process sees."""
        ...

    def set_device(self, device: torch.device) -> None:
        """Make a device the current one."""
        ...

    def current_stream(self, device: torch.device) -> Any:
        """The stream that work on a device is put on."""
        ...

    def get_device_name(self, device: torch.device) -> str:
        """What the driver calls a device."""
        ...

    def get_device_properties(self, device: torch.device) -> Any:
        """Properties of a device: of them `total_memory` is used, in bytes."""
        ...

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Let the peak of allocated bytes start from what is allocated now."""
        ...

    def max_memory_allocated(self, device: torch.device) -> int:
        """Most bytes allocated at once since the reset."""
        ...


_stand_ins: list[Runtime] = []


def runtime() -> Runtime:
    """The runtime in use: `torch.cuda` unless something stands in for it."""
    return _stand_ins[-1] if _stand_ins else torch.cuda


@contextmanager
def standing_in(stand_in: Runtime) -> Iterator[None]:
    """Use `stand_in` for `torch.cuda` meanwhile."""
    _stand_ins.append(stand_in)
    try:
        yield
    finally:
        _stand_ins.remove(stand_in)


def is_host(device: torch.device) -> bool:
    """Whether work on `device` is done by the processor itself, as it is asked for."""
    return device.type == "cpu"
