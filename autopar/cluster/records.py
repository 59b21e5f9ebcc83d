"""Devices, links and clusters: frozen records with units in their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import combinations, permutations
from math import gcd

HOST_BYTES_PER_S = 2.5e10
"""What PCIe 4.0 x16 reaches, where a device's file says nothing of its link to the host."""


@dataclass(frozen=True)
class Device:
    """A device model. Rates are datasheet peaks; `efficiency` holds what share of them is reached.

    `peak_flops_per_s` and `efficiency` are keyed by dtype name (`bfloat16`); `efficiency["memory"]` is for bandwidth.
    `usable_bytes` is what a process can allocate at most; `reserve_bytes` is held back for context, allocator slack and
    communication buffers. `overlap` is the share of communication that compute can hide at best. `sources` says where
    each figure is from. `units` are multiprocessors or cores (0: not known), `architecture` is a generation that
    `architecture.py` knows, or empty; `fits` names the device whose fitted constants are this one's. Its
    kernels take 1 / `speed` of the usual time. `host_bytes_per_s`: between its memory and the host's, one way.
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
    speed: float = 1.0
    host_bytes_per_s: float = HOST_BYTES_PER_S

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
class Fabric(Link):
    """A connection of which more is known than its rate.

    `in_switch`: switches add up, so that an all-reduce sends each byte once. Between nodes: with `rails` devices of
    equal number in their nodes have switches of their own, and reach others by way of the node. `pod_nodes` are joined
    at the full rate, and at `spine_share` of it with those of other pods (0: all are one pod).
    """

    in_switch: bool = False
    rails: bool = False
    pod_nodes: int = 0
    spine_share: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Equal devices in `nodes` nodes of `devices_per_node`; `intra` joins those of a node, `inter` joins nodes.

    Of a mixed cluster's part, `network` names what `inter` is a link of, and `first_device` is the number of its first
    device in the whole.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link
    network: str = ""
    first_device: int = 0

    @property
    def devices(self) -> int:
        """Number of devices in all."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Wires:
    """Links between nodes one by one, as seconds a message and bytes per second and device, each (nodes, nodes)."""

    latency_s: tuple[tuple[float, ...], ...]
    bytes_per_s: tuple[tuple[float, ...], ...]

    def link(self, one: int, other: int) -> Link:
        """The slower direction between two nodes."""
        ways = permutations((one, other))
        return slower(*(Link("wires", self.bytes_per_s[a][b], self.latency_s[a][b]) for a, b in ways))

    @property
    def slowest(self) -> Link:
        """The lowest rate and the longest latency between any two nodes."""
        return reduce(slower, (self.link(a, b) for a, b in combinations(range(len(self.latency_s)), 2)))


@dataclass(frozen=True)
class MixedCluster(Cluster):
    """Nodes that differ: `parts` of equal nodes, their devices numbered in order.

    Nodes of one network are joined by the slower of their own links, others by `between`; where there are `wires`, all
    nodes by these. Beside the parts it is described as one cluster: by the slowest links and the means of its devices'
    figures, but by the largest memory.
    """

    parts: tuple[Cluster, ...] = ()
    between: Link | None = None
    wires: Wires | None = None

    @property
    def devices(self) -> int:
        """Number of devices in all parts."""
        return sum(part.devices for part in self.parts)

    def link(self, one: int, other: int) -> Link:
        """What joins two nodes, by their numbers in the whole; the slower direction of it."""
        if self.wires is not None:
            return self.wires.link(one, other)
        first, second = self.part_of_node(one), self.part_of_node(other)
        if self.between is not None and first.network != second.network:
            return self.between
        return slower(first.inter, second.inter)

    def part_of_node(self, node: int) -> Cluster:
        """The part that a node is of."""
        return self.parts[self._place_of_node[node][0]]

    def devices_of_node(self, node: int) -> range:
        """The devices of a node."""
        part, number = self._place_of_node[node]
        first = self.parts[part].first_device + number * self.parts[part].devices_per_node
        return range(first, first + self.parts[part].devices_per_node)

    def node_of_device(self, device: int) -> int:
        """The node that a device is in."""
        return self._node_of_device[device]

    def kind_of_node(self, node: int) -> int:
        """A number that nodes have in common which differ in nothing but their wires."""
        return self._kinds[self._place_of_node[node][0]]

    @cached_property
    def _place_of_node(self) -> list[tuple[int, int]]:
        """Of each node its part and its number there."""
        return [(i, n) for i, part in enumerate(self.parts) for n in range(part.nodes)]

    @cached_property
    def _node_of_device(self) -> list[int]:
        return [node for node in range(self.nodes) for _ in self.devices_of_node(node)]

    @cached_property
    def _kinds(self) -> list[int]:
        """Of each part the first one that is like it."""
        plain = [replace(part, name="", nodes=0, first_device=0) for part in self.parts]
        return [plain.index(part) for part in plain]


def slower(one: Link, other: Link) -> Link:
    """The link with the lower rate and the longer latency of two."""
    slowest = replace(
        min((one, other), key=lambda link: link.bytes_per_s), latency_s=max(one.latency_s, other.latency_s)
    )
    if isinstance(slowest, Fabric) and slowest.in_switch:
        return replace(slowest, in_switch=adds_up(one) and adds_up(other))
    return slowest


def adds_up(link: Link) -> bool:
    """Whether a link's switches add up what passes them."""
    return isinstance(link, Fabric) and link.in_switch


def mixed_cluster(
    name: str, parts: Sequence[Cluster], between: Link | None = None, wires: Wires | None = None
) -> MixedCluster:
    """A cluster of parts, in this order."""
    numbered, first = [], 0
    for part in parts:
        numbered.append(replace(part, first_device=first))
        first += part.devices
    weights = [part.devices for part in parts]
    intra = reduce(slower, (part.intra for part in parts))
    inter = reduce(slower, [part.inter for part in parts] + ([between] if between else []))
    if wires is not None:
        inter = wires.slowest
    per_node = gcd(*(part.devices_per_node for part in parts))
    return MixedCluster(
        name, mean_device([part.device for part in parts], weights), sum(part.nodes for part in parts), per_node,
        intra, inter, parts=tuple(numbered), between=between, wires=wires,
    )  # fmt: skip


def mean_device(devices: Sequence[Device], weights: Sequence[int]) -> Device:
    """What so many of each device are on average; of memory what the one has that can hold most tensors."""
    kinds = list(dict.fromkeys(devices))
    if len(kinds) == 1:
        return kinds[0]
    roomiest = max(kinds, key=lambda device: device.limit_bytes(None))
    dtypes = [d for d in roomiest.peak_flops_per_s if all(d in device.peak_flops_per_s for device in kinds)]

    def mean(figures: Sequence[float | None]) -> float | None:
        known = [f for f in figures if f is not None]
        total = sum(f * w for f, w in zip(known, weights, strict=True)) if len(known) == len(figures) else None
        return None if total is None else total / sum(weights)

    return replace(
        roomiest,
        name=" + ".join(dict.fromkeys(device.name for device in kinds)),
        peak_flops_per_s={d: mean([device.peak_flops_per_s[d] for device in devices]) or 0.0 for d in dtypes},
        power_w=mean([device.power_w for device in devices]),
        price_per_hour=mean([device.price_per_hour for device in devices]),
        overlap=min(device.overlap for device in kinds),
        fits="",
        speed=1.0,
    )


def device_of(cluster: Cluster, devices: Iterable[int]) -> Device:
    """What the devices of these numbers are, on average."""
    if not isinstance(cluster, MixedCluster):
        return cluster.device
    parts = [cluster.part_of_node(cluster.node_of_device(d)) for d in devices]
    return mean_device([part.device for part in parts], [1] * len(parts))
