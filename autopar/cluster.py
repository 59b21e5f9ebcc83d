"""Devices, links and clusters: frozen records with units in their names, read from TOML or built from a name."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator

from autopar.architecture import ARCHITECTURES
from autopar.errors import ConfigError
from autopar.files import write_atomically
from autopar.settings import Refused, Settings, check_settings, near, read_settings, user_folder

GIB = 1 << 30
WHAT_IF = ("network", "memory", "compute")
"""What `what_if` can scale: the link between nodes, the usable bytes, the peak rates."""
SIZED = re.compile(r"(?:(\d+)x)?(\d+)x(\D.*)")
"""How a cluster is named by its size: [NODESx]DEVICESxDEVICE."""
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float4_e2m1fn_x2")
"""Dtypes a device file may give rates for, by the names torch has for them."""


@dataclass(frozen=True)
class Device:
    """A device model. Rates are datasheet peaks; `efficiency` holds what share of them is reached.

    `peak_flops_per_s` and `efficiency` are keyed by dtype name (`bfloat16`); `efficiency["memory"]` is for bandwidth.
    `usable_bytes` is what a process can allocate at most; `reserve_bytes` is held back for context, allocator slack and
    communication buffers. `overlap` is the share of communication that compute can hide at best. `sources` says where
    each figure is from. `units` are multiprocessors or cores (0: not known), `architecture` is a generation that
    `architecture.py` knows, or empty; `fits` names the device whose fitted constants are this one's.
    """

    name: str
    backend: str  # "cuda" or "cpu"
    memory_bytes: int
    usable_bytes: int
    reserve_bytes: int
    peak_flops_per_s: dict[str, float] = field(hash=False)
    memory_bytes_per_s: float
    efficiency: dict[str, float] = field(hash=False)
    launch_s: float
    overlap: float = 0.0
    aliases: tuple[str, ...] = ()
    power_w: float | None = None
    price_per_hour: float | None = None
    sources: tuple[str, ...] = ()
    architecture: str = ""
    units: int = 0
    fits: str = ""

    def limit_bytes(self, asked_bytes: int | None) -> int:
        """Bytes of tensors it may hold: those asked for as far as there are so many, else what can be used less the
        reserve."""
        return self.usable_bytes - self.reserve_bytes if asked_bytes is None else min(asked_bytes, self.usable_bytes)


@dataclass(frozen=True)
class Link:
    """A connection between devices: `bytes_per_s` per device one way, `latency_s` per message."""

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """Equal devices in `nodes` nodes of `devices_per_node`; `intra` joins those of a node, `inter` joins nodes."""

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link

    @property
    def devices(self) -> int:
        """Number of devices in all."""
        return self.nodes * self.devices_per_node


# --- reading them -------------------------------------------------------------------------------------------------

Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1, strict=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class LinkFile(Settings):
    """A link in a file: GB/s (1e9 bytes) per device one way by datasheet, the share reached, and microseconds."""

    name: str
    gb_per_s: Positive
    efficiency: Share
    latency_us: Positive

    def link(self) -> Link:
        """The link at the rate it reaches."""
        return Link(self.name, self.gb_per_s * 1e9 * self.efficiency, self.latency_us * 1e-6)


class DeviceFile(Settings):
    """A file of `profiles/devices`: datasheet figures, their sources, and the links of the usual node."""

    name: str
    aliases: tuple[str, ...] = Field(default=(), strict=False)
    backend: Literal["cuda", "cpu"] = "cuda"
    memory_gib: Positive
    usable_gib: Positive
    reserve_gib: Positive
    memory_gb_per_s: Positive
    launch_us: Positive
    architecture: str = ""
    units: Annotated[int, Field(ge=0)] = 0
    overlap: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    power_w: Positive | None = None
    price_per_hour: Positive | None = None
    peak_tflops: dict[str, Positive]
    efficiency: dict[str, Share]
    intra: LinkFile
    inter: LinkFile
    sources: dict[str, str]

    @field_validator("peak_tflops", "efficiency")
    @classmethod
    def _known_dtypes(cls, table: dict[str, float]) -> dict[str, float]:
        unknown = [key for key in table if key not in DTYPES and key != "memory"]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no dtype; give {', '.join(DTYPES)} (efficiency: memory, too)")
        return table

    @field_validator("architecture")
    @classmethod
    def _known_architecture(cls, name: str) -> str:
        if name and name not in ARCHITECTURES:
            raise ValueError(f"one of {', '.join(ARCHITECTURES)}, or nothing")
        return name

    def device(self) -> Device:
        """The device in base units."""
        return Device(
            name=self.name,
            backend=self.backend,
            memory_bytes=int(self.memory_gib * GIB),
            usable_bytes=int(self.usable_gib * GIB),
            reserve_bytes=int(self.reserve_gib * GIB),
            peak_flops_per_s={dtype: float(round(tflops * 1e12)) for dtype, tflops in self.peak_tflops.items()},
            memory_bytes_per_s=self.memory_gb_per_s * 1e9,
            efficiency=dict(self.efficiency),
            launch_s=self.launch_us * 1e-6,
            overlap=self.overlap,
            aliases=self.aliases,
            power_w=self.power_w,
            price_per_hour=self.price_per_hour,
            sources=tuple(f"{field}: {source}" for field, source in self.sources.items()),
            architecture=self.architecture,
            units=self.units,
            fits=self.name,
        )


class ClusterFile(Settings):
    """A cluster file: equal nodes of one device; what isn't given is as for the device's usual node.

    `power_w` and `price_per_hour` (in any currency) are those of one device with its share of the node.
    """

    name: str
    device: str
    nodes: Count
    devices_per_node: Count
    intra: LinkFile | None = None
    inter: LinkFile | None = None
    power_w: Positive | None = None
    price_per_hour: Positive | None = None
    sources: dict[str, str] = Field(default_factory=dict)

    @field_validator("device")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            find_device(name)
        except ConfigError as error:
            raise Refused(*error.mistakes) from None
        return name

    def cluster(self) -> Cluster:
        """The cluster with its device looked up."""
        found = find_device(self.device)
        intra, inter = self.intra or found.intra, self.inter or found.inter
        power_w, price = self.power_w or found.power_w, self.price_per_hour or found.price_per_hour
        device = replace(found.device(), power_w=power_w, price_per_hour=price)
        return Cluster(self.name, device, self.nodes, self.devices_per_node, intra.link(), inter.link())


def load_cluster(text: str) -> Cluster:
    """A cluster from `[NODESx]DEVICESxDEVICE`, the path of a TOML file, or the name of a shipped cluster.

    Raises ConfigError with every mistake, or with the names most like an unknown one.
    """
    sized = SIZED.fullmatch(text)
    if sized:
        return _sized(text, int(sized[1] or 1), int(sized[2]), sized[3])
    if text.endswith(".toml") or "/" in text:
        return read_cluster(Path(text))
    for cluster in shipped_clusters():
        if cluster.name == text:
            return cluster.cluster()
    known = [c.name for c in shipped_clusters()] + [f"8x{d.name}" for d in all_devices()]
    raise ConfigError(
        f"cluster {text!r} is not known{near(text, known)} Give [NODESx]DEVICESxDEVICE such as 16x8xh100-80gb, "
        "a TOML file, `local`, or a name that `autopar clusters` lists."
    )


def read_cluster(path: Path) -> Cluster:
    """The cluster of a TOML file; raises ConfigError with every mistake in it."""
    return read_settings(path, ClusterFile).cluster()


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


@cache
def shipped_clusters() -> tuple[ClusterFile, ...]:
    """The clusters that come with autopar."""
    return tuple(read_settings(path, ClusterFile) for path in sorted((profiles_folder() / "clusters").glob("*.toml")))


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


def what_if(cluster: Cluster, text: str) -> Cluster:
    """The cluster with what `network=0.8,memory=0.9` names scaled (see `WHAT_IF`); raises ConfigError."""
    pairs = [item.partition("=") for item in text.split(",")]
    scales = {key.strip(): _factor(value) for key, _, value in pairs}
    bad = [f"{key}={value}" for key, _, value in pairs if key.strip() not in WHAT_IF or not _factor(value)]
    if bad:
        allowed = ", ".join(WHAT_IF)
        raise ConfigError(f"what-if {', '.join(bad)}: give positive factors for {allowed}, such as network=0.8")
    network, memory, compute = (scales.get(key, 1.0) for key in WHAT_IF)
    device = replace(
        cluster.device,
        usable_bytes=int(cluster.device.usable_bytes * memory),
        peak_flops_per_s={k: v * compute for k, v in cluster.device.peak_flops_per_s.items()},
    )
    inter = replace(cluster.inter, bytes_per_s=cluster.inter.bytes_per_s * network)
    return replace(cluster, name=f"{cluster.name} with {text}", device=device, inter=inter)


def _factor(text: str) -> float:
    """A positive finite number, else 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def _sized(text: str, nodes: int, devices_per_node: int, device: str) -> Cluster:
    data = {"name": text, "device": device, "nodes": nodes, "devices_per_node": devices_per_node}
    return check_settings(data, ClusterFile, f"cluster {text!r}").cluster()


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
    inside = Path(__file__).parent / "_profiles"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "profiles"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _toml(table: dict[str, Any], prefix: str = "") -> str:
    """Plain values of a table first, then its sub-tables."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines) + "\n"
