"""Devices, links and clusters: frozen records with units in their names, read from TOML or built from a name."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """A device model. Rates are datasheet peaks; `efficiency` holds what share of them is reached.

    `peak_flops_per_s` and `efficiency` are keyed by dtype name (`bfloat16`); `efficiency["memory"]` is for bandwidth.
    `usable_bytes` is what a process can allocate at most; `reserve_bytes` is held back for context, allocator slack and
    communication buffers. `overlap` is the share of communication that compute can hide at best. `sources` says where
    each figure is from.
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

    def link(self, ranks: int, stride: int) -> Link:
        """The slowest link that a group of `ranks` devices, each `stride` apart, has to cross."""
        return self.intra if ranks * stride <= self.devices_per_node else self.inter
