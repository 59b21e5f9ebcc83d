"""The devices there are: shipped ones and those that the user has added."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cluster.device_file import DeviceFile
from autopar.errors import ConfigError
from autopar.files import write_atomically
from autopar.settings import check_settings, near, read_settings, user_folder

SIZED = re.compile(r"(?:(\d+)x)?(\d+)x(\D.*)")
"""How a cluster is named by its size: [NODESx]DEVICESxDEVICE."""


def find_device(name: str) -> DeviceFile:
    """The device with this name or alias (case and punctuation don't count); ConfigError names the nearest ones."""
    known = {_plain(key): device for device in all_devices() for key in (device.name, *device.aliases)}
    if _plain(name) in known:
        return known[_plain(name)]
    names = sorted({key for device in all_devices() for key in (device.name, *device.aliases)})
    raise ConfigError(
        f"device {name!r} is not known{near(name.lower(), names)} `autopar devices` lists those there are; "
        f"`autopar devices add {name} --tflops ... --bandwidth-gbs ... --memory-gib ...` adds it."
    )


def same_device(first: str, second: str) -> bool:
    """Whether two names mean one kind of device: equal, or names of one device file."""
    known = {_plain(key): device.name for device in all_devices() for key in (device.name, *device.aliases)}
    return first == second or known.get(_plain(first), first) == known.get(_plain(second), second)


def all_devices() -> list[DeviceFile]:
    """Every device: the shipped ones, then those that the user has added (an added one wins over a shipped one).

    An added file that can't be used is left out, which standard error is told once.
    """
    added = [_added_device(path) for path in sorted((user_folder() / "devices").glob("*.toml"))]
    return [*_shipped_devices(), *(device for device in added if device is not None)]


def add_device(device: DeviceFile) -> Path:
    """Write a device to the user's folder, where the loaders find it; the file's path. An earlier one is replaced."""
    folder = user_folder() / "devices"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_plain(device.name)}.toml"
    write_atomically(path, _toml(device.model_dump(exclude_none=True)))
    _added_device.cache_clear()
    return path


def device_from_figures(
    name: str,
    *,
    tflops: float,
    fp32_tflops: float,
    bandwidth_gbs: float,
    memory_gib: float,
    link_gbs: float,
    network_gbs: float,
    architecture: str = "",
    units: int = 0,
) -> DeviceFile:
    """A device file from the few figures people know, the rest generic; raises ConfigError with every mistake."""
    _require_usable_name(name)
    said, generic = "given to `autopar devices add`", "generic"
    data = {
        "name": name,
        "architecture": architecture,
        "units": units,
        "memory_gib": memory_gib,
        "usable_gib": memory_gib * 0.97,
        "reserve_gib": memory_gib * 0.04,
        "memory_gb_per_s": bandwidth_gbs,
        "launch_us": 5.0,
        "overlap": 0.5,
        "peak_tflops": {"bfloat16": tflops, "float16": tflops, "float32": fp32_tflops},
        "efficiency": {"bfloat16": 0.65, "float16": 0.65, "float32": 0.8, "memory": 0.8},
        "intra": {"name": "link in a node", "gb_per_s": link_gbs, "efficiency": 0.75, "latency_us": 5.0},
        "inter": {"name": "network", "gb_per_s": network_gbs, "efficiency": 0.8, "latency_us": 15.0},
        "sources": {"peak_tflops": said, "memory_gb_per_s": said, "usable_gib": generic, "efficiency": generic},
    }
    return check_settings(data, DeviceFile, f"device {name!r}")


@cache
def _shipped_devices() -> tuple[DeviceFile, ...]:
    return tuple(read_settings(path, DeviceFile) for path in sorted((profiles_folder() / "devices").glob("*.toml")))


@cache
def _added_device(path: Path) -> DeviceFile | None:
    try:
        return read_settings(path, DeviceFile)
    except ConfigError as error:
        print("\n".join(f"warning: {m} The file is left out." for m in error.mistakes), file=sys.stderr)
        return None


def _require_usable_name(name: str) -> None:
    """Raise ConfigError unless clusters can be named after the device."""
    sized = SIZED.fullmatch(f"8x{name}")
    if not _plain(name) or sized is None or sized[3] != name:
        raise ConfigError(
            f"device {name!r}: `--cluster 8x{name}` would not be read as 8 of it; give a name that begins with a "
            "letter, such as rtx4090"
        )


def profiles_folder() -> Path:
    """The shipped profiles: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parents[1] / "_profiles"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "profiles"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _toml(table: dict[str, Any], prefix: str = "") -> str:
    """Plain values of a table first, then its sub-tables."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines) + "\n"
