"""Where the groups of a pipeline stand: which devices each has, what things cost there and between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Protocol

import numpy as np

from autopar.cluster import Link, MixedCluster, slower
from autopar.cost.collectives import one_link_seconds
from autopar.cost.mixed import MixedPricer
from autopar.cost.pricer import Pricer
from autopar.graph import CollectiveKey
from autopar.placement.local import place
from autopar.placement.path import shortest_path
from autopar.placement.problem import Floats, problem_of_links

MESSAGE_BYTES = 1 << 24
"""Message by which links of different latency and rate are compared."""
ROUNDS = 3
"""Times that a placement is shaken and mended, of each size of groups."""
EFFORT = 2000
"""Exchanges tried for it at most."""

Devices = tuple[tuple[int, ...], ...]
"""Devices of each group, by their numbers in the cluster, in the order of the group's ranks."""


class Ground(Protocol):
    """Where groups stand, in the order of a pipeline."""

    @property
    def devices(self) -> Devices:
        """Devices of each group."""
        ...

    @property
    def pricers(self) -> Sequence[Pricer]:
        """What things cost on each group."""
        ...

    def seconds(self, kind: str, size_bytes: int, groups: Sequence[int]) -> float:
        """Seconds of a collective between the devices at one place of some groups, all such places at once."""
        ...


@dataclass(frozen=True, eq=False)
class EvenGround:
    """Groups of neighbouring devices of equal nodes, one after the other."""

    pricer: Pricer
    groups: int
    size: int
    _known: dict[CollectiveKey, float] = field(default_factory=dict, repr=False)

    @property
    def devices(self) -> Devices:
        """Devices of each group."""
        return even_devices(self.groups, self.size, self.pricer.cluster.first_device)

    @property
    def pricers(self) -> Sequence[Pricer]:
        """The same for each group."""
        return (self.pricer,) * self.groups

    def seconds(self, kind: str, size_bytes: int, groups: Sequence[int]) -> float:
        """Seconds of a collective between groups: at least a node apart where a node's end lies between them."""
        one, other, node = min(groups), max(groups), self.pricer.cluster.devices_per_node
        apart = (other - one) * self.size
        if one * self.size // node != other * self.size // node:
            apart = max(apart, node)
        key = CollectiveKey(kind, size_bytes, len(groups), apart)
        if key not in self._known:
            self._known[key] = float(self.pricer.collectives([key]).seconds[0])
        return self._known[key]


@dataclass(frozen=True, eq=False)
class MixedGround:
    """Groups of devices that differ. `pricers`: of each group; those of groups with equal nodes are the same one."""

    cluster: MixedCluster
    devices: Devices
    pricers: Sequence[Pricer]

    def seconds(self, kind: str, size_bytes: int, groups: Sequence[int]) -> float:
        """Seconds of a collective between groups, over the slowest link between partners."""
        links = [
            self._link(a, b) for i in groups for j in groups if i < j
            for a, b in zip(self.devices[i], self.devices[j], strict=True)
        ]  # fmt: skip
        return one_link_seconds(kind, size_bytes, len(groups), reduce(slower, dict.fromkeys(links)))

    def _link(self, one: int, other: int) -> Link:
        first, second = (self.cluster.node_of_device(d) for d in (one, other))
        return self.cluster.part_of_node(first).intra if first == second else self.cluster.link(first, second)


def ground_on(pricer: MixedPricer, devices: Devices) -> MixedGround:
    """The ground of groups on these devices of a mixed cluster."""
    cluster = pricer.cluster
    nodes = [tuple(dict.fromkeys(cluster.node_of_device(d) for d in group)) for group in devices]
    kinds = [tuple(sorted({cluster.kind_of_node(n) for n in own})) for own in nodes]
    slowest: dict[tuple[int, ...], Link] = {}
    for kind, own in zip(kinds, nodes, strict=True):
        link = _link_within(cluster, own)
        slowest[kind] = max(slowest.get(kind, link), link, key=_message_s)
    pricers = [
        pricer.on([cluster.part_of_node(n) for n in own], slowest[kind]) for kind, own in zip(kinds, nodes, strict=True)
    ]
    return MixedGround(cluster, devices, pricers)


def _message_s(link: Link) -> float:
    return link.latency_s + MESSAGE_BYTES / link.bytes_per_s


def _link_within(cluster: MixedCluster, nodes: Sequence[int]) -> Link:
    """What joins the nodes of a group: the mean of the links of the node whose links are slowest."""
    if len(nodes) == 1:
        return cluster.part_of_node(nodes[0]).inter
    means = []
    for node in nodes:
        links = [cluster.link(node, other) for other in nodes if other != node]
        latency_s = sum(link.latency_s for link in links) / len(links)
        means.append(Link(links[0].name, len(links) / sum(1 / link.bytes_per_s for link in links), latency_s))
    return max(means, key=_message_s)


# --- which devices --------------------------------------------------------------------------------------------------


def even_devices(groups: int, size: int, first: int = 0) -> Devices:
    """Neighbouring devices as groups, from the first on."""
    return tuple(tuple(range(first + g * size, first + (g + 1) * size)) for g in range(groups))


def placed_devices(cluster: MixedCluster, size: int, sum_bytes: float, hop_bytes: float) -> Devices:
    """As many groups of `size` devices as there are, each of equal nodes of one network where that can be, in an order
    in which slow links are crossed least. `sum_bytes`: of gradients in all; `hop_bytes`: sent from group to group.

    A group has whole nodes, or an equal share of one. What is left over of nodes alike makes groups of one network.
    """
    blocks = _blocks(cluster, size)
    if not blocks:
        return ()
    ordered = _ordered(cluster, blocks, sum_bytes / len(blocks), hop_bytes)
    groups: list[tuple[int, ...]] = []
    for block in ordered:
        devices = [d for node in block for d in cluster.devices_of_node(node)]
        groups += [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]
    return tuple(groups)


def _blocks(cluster: MixedCluster, size: int) -> list[tuple[int, ...]]:
    """Nodes of each group, or each node that several groups share."""
    alike: dict[int, list[int]] = {}
    for node in range(cluster.nodes):
        alike.setdefault(cluster.kind_of_node(node), []).append(node)
    blocks, left = [], dict[str, list[int]]()
    for nodes in alike.values():
        part = cluster.part_of_node(nodes[0])
        each = part.devices_per_node
        count = size // each if size % each == 0 else 1 if each % size == 0 else 0
        whole = len(nodes) // count * count if count else 0
        blocks += [tuple(nodes[at : at + count]) for at in range(0, whole, count or 1)]
        left.setdefault(part.network, []).extend(nodes[whole:])
    for rest in left.values():
        blocks += _filled(cluster, rest, size)
    return blocks


def _filled(cluster: MixedCluster, nodes: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Groups of unlike nodes that together have so many devices, as long as nodes in their order come to that."""
    block: list[int] = []
    for node in nodes:
        block.append(node)
        held = sum(len(cluster.devices_of_node(n)) for n in block)
        if held >= size:
            if held == size:
                yield tuple(block)
            block = []


def _ordered(
    cluster: MixedCluster, blocks: Sequence[tuple[int, ...]], sum_bytes: float, hop_bytes: float
) -> Sequence[tuple[int, ...]]:
    """Blocks along the fastest way through them; with wires, nodes of one kind change blocks where that pays."""
    nodes = [node for block in blocks for node in block]
    latency, rate = _tables(cluster, nodes)
    if len({len(block) for block in blocks}) == 1:
        kinds = tuple(cluster.kind_of_node(node) for node in nodes)
        problem = problem_of_links(latency, rate, len(blocks), sum_bytes, hop_bytes, kinds)
        return [tuple(nodes[i] for i in group) for group in place(problem, ROUNDS, EFFORT).groups]
    hops, ends = latency + hop_bytes / rate, np.cumsum([0, *map(len, blocks)])
    pieces = list(pairwise(ends.tolist()))
    between = [[float(hops[a:b, c:d].max()) for c, d in pieces] for a, b in pieces]
    return [blocks[i] for i in shortest_path(np.array(between))]


def _tables(cluster: MixedCluster, nodes: Sequence[int]) -> tuple[Floats, Floats]:
    """Latencies and rates between nodes, each the slower direction."""
    if cluster.wires is not None:
        latency, rate = np.array(cluster.wires.latency_s), np.array(cluster.wires.bytes_per_s)
        there = np.ix_(nodes, nodes)
        return np.maximum(latency, latency.T)[there], np.minimum(rate, rate.T)[there]
    kinds = [cluster.kind_of_node(node) for node in nodes]
    some = dict(zip(kinds, nodes, strict=True))
    links = [[cluster.link(a, b) for b in some.values()] for a in some.values()]
    where = [list(some).index(kind) for kind in kinds]
    latency, rate = (
        np.array([[getattr(x, name) for x in row] for row in links]) for name in ("latency_s", "bytes_per_s")
    )
    return latency[np.ix_(where, where)], rate[np.ix_(where, where)]


def group_sizes(cluster: MixedCluster) -> list[int]:
    """Sizes of groups worth a look: those that some part's devices divide into."""
    return sorted({size for p in cluster.parts for size in range(1, p.devices + 1) if p.devices % size == 0})


def reversed_ground(ground: MixedGround) -> Iterator[MixedGround]:
    """The ground the other way round, where that is another one."""
    if list(ground.pricers) != list(ground.pricers)[::-1]:
        yield replace(ground, devices=ground.devices[::-1], pricers=ground.pricers[::-1])
