"""Seconds of collectives: rings and trees on one link, and their composition over nodes. Closed forms.

A link has `w` bytes per second and device one way, and `a` seconds a message. With n ranks, a full buffer of B bytes:

    all-gather, reduce-scatter (ring)    (n-1) a + (n-1)/n B/w
    all-reduce     the better of         2 (n-1) a + 2 (n-1)/n B/w   (ring)
                   and                   2 ceil(log2 n) a + 2 B/w    (tree)
    broadcast (tree, pipelined)          ceil(log2 n) a + B/w
    all-to-all (B exchanged by a rank)   ceil(log2 n) a + (n-1)/n B/w

(R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.) A group
that spans k nodes with l of its ranks in each sends as NCCL does, round rings (or up and down trees) that enter and
leave a node once for each of the l ranks, so that a share of 1/l of the bytes takes each rank's link between nodes:

    all-gather, reduce-scatter, rings    (k-1) a + (n-k) a_in + (n-1)/n max(B/w_in, B/(l w))
    all-reduce     the better of         twice that
                   and of two trees      2 ceil(log2 k) a + 2 ceil(log2 l) a_in + max(2 B/w_in, t B/(l w))
    broadcast                            ceil(log2 k) a + ceil(log2 l) a_in + max(B/w_in, B/(l w))
    all-to-all                           the slower of what stays in the node and of what leaves it

    in switches    all-reduce            2 a + 2 ceil(log2 l) a_in + max(2 B/w_in, B/(l w))

where t is 1 for two nodes, each of which is the root of one tree and the leaf of the other, and 2 for more (P.
Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). As `w`
is the rate of one device and every device is in one group of the shape at a time, groups running at once don't slow
each other further: where devices share an adapter, w is a device's part of it.

Switches that add up (`in_switch`; R. Graham et al., "Scalable hierarchical aggregation protocol (SHARP)", 2016) get and
send each byte once: 2 a + B/w on one link, and inside a node B/w_in in place of 2 B/w_in. Pods are a third level: an
edge of a pod is passed once for each of the q ranks that a group has there, so that a link between nodes seems to have
min(w, w_s q/l), with w_s between pods. On rails, members with other numbers in their nodes are reached by way of the
node, as NCCL does (PXN): one hop a_in more, and in an all-to-all all that is for other numbers moves inside first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, log2

import numpy as np

from autopar.cluster import Cluster, Fabric, Link, adds_up
from autopar.cost.pricer import CollectiveTimes
from autopar.errors import ConfigError
from autopar.graph import CollectiveKey
from autopar.measure.models.device import DeviceModel

NO_NODES = 0
"""Stands for devices a node where there is one node only: no group leaves it."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def collective_times(keys: Sequence[CollectiveKey], cluster: Cluster) -> CollectiveTimes:
    """Seconds of each collective on `cluster`, in closed form."""
    per_node = cluster.devices_per_node if cluster.nodes > 1 else NO_NODES
    shape = (per_node, cluster.intra, cluster.inter)
    seconds = np.array([collective_seconds(key, *shape) for key in keys], dtype=np.float64)
    return CollectiveTimes(seconds, ["roofline"] * len(keys))


def fitted_times(keys: Sequence[CollectiveKey], cluster: Cluster, model: DeviceModel) -> CollectiveTimes:
    """Seconds of each collective: inside a node the closed form times the ratio fitted for its kind and ranks.

    What is fitted is what the device's own switches do, so that a cluster's word on these counts elsewhere only.
    """
    closed = collective_times(keys, cluster)
    seconds, sources = closed.seconds, list(closed.sources)
    groups: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        ranks, nodes = ranks_by_level(key.ranks, key.stride, cluster.devices_per_node)
        if nodes == 1 and ranks > 1 and (variant := _nearest(key.kind, ranks, model)):
            groups[variant].append(i)
    plain = Link(cluster.intra.name, cluster.intra.bytes_per_s, cluster.intra.latency_s)
    for variant, members in groups.items():
        closed_s = [one_link_seconds(keys[i].kind, keys[i].bytes, keys[i].ranks, plain) for i in members]
        sizes = {"bytes": np.array([keys[i].bytes for i in members], float), "closed_s": np.array(closed_s)}
        seconds[members] = model.seconds("collectives", sizes, "", (variant,))
        for i in members:
            sources[i] = "fitted"
    return CollectiveTimes(seconds, sources)


def _nearest(kind: str, ranks: int, model: DeviceModel) -> str:
    """The fitted variant of a kind whose ranks are nearest; '' if there is none."""
    there = [n for n in range(2, 17) if model.own.find("collectives", "", f"{kind} {n}")]
    return f"{kind} {min(there, key=lambda n: abs(log2(n / ranks)))}" if there else ""


@lru_cache(maxsize=1 << 20)
def collective_seconds(key: CollectiveKey, devices_per_node: int, intra: Link, inter: Link) -> float:
    """Seconds of one collective; 0 for a group of one. Raises ConfigError for an unknown kind."""
    if key.kind not in KINDS:
        raise ConfigError(f"collective {key.kind!r} is not known; allowed: {', '.join(KINDS)}")
    if key.ranks <= 1 or key.bytes == 0:
        return 0.0
    local, nodes = ranks_by_level(key.ranks, key.stride, devices_per_node)
    if nodes == 1:
        return one_link_seconds(key.kind, key.bytes, local, intra)
    inter = seen_by(key.kind, key.ranks, key.stride, devices_per_node, intra, inter)
    if local == 1:
        return one_link_seconds(key.kind, key.bytes, nodes, inter)
    return _two_levels(key.kind, key.bytes, local, nodes, intra, inter)


def ranks_by_level(ranks: int, stride: int, devices_per_node: int) -> tuple[int, int]:
    """Ranks of the group within a node, and nodes it spans, for `ranks` devices each `stride` apart.

    All groups of the shape run at once, and what counts is the slowest: where nodes can't be dealt out into whole
    groups some group lies across two of them.
    """
    if devices_per_node % (ranks * stride) == 0 or devices_per_node == NO_NODES:
        return ranks, 1
    if ranks * stride < devices_per_node:
        return max(1, ranks // 2), 2
    local = min(ranks, max(1, devices_per_node // stride))
    return local, ceil(ranks / local)


def seen_by(kind: str, ranks: int, stride: int, devices_per_node: int, intra: Link, inter: Link) -> Link:
    """The link between nodes as a group sees it that has `ranks` devices each `stride` apart: slower where it lies
    across pods or rails."""
    if not isinstance(inter, Fabric):
        return inter
    rate, latency_s = inter.bytes_per_s, inter.latency_s
    if inter.pod_nodes:
        local, nodes = ranks_by_level(ranks, stride, devices_per_node)
        there, pods = ranks_by_level(ranks, stride, devices_per_node * inter.pod_nodes)
        if kind == "all_to_all" and pods > 1:  # what is for other pods, of what is for other nodes
            rate *= min(1.0, inter.spine_share * (1 - 1 / nodes) / (1 - 1 / pods))
        elif pods > 1:
            rate *= min(1.0, inter.spine_share * there / local)
    even = devices_per_node % stride == 0 and ranks * stride % devices_per_node == 0
    if inter.rails and stride % devices_per_node and not even:
        rate, latency_s = min(rate, intra.bytes_per_s), latency_s + intra.latency_s
    return replace(inter, bytes_per_s=rate, latency_s=latency_s)


def one_link_seconds(kind: str, size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of a collective whose ranks are joined by one kind of link."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks * size_bytes / link.bytes_per_s
    depth = ceil(log2(ranks)) * link.latency_s
    ring = (ranks - 1) * link.latency_s + share
    if kind in ("all_gather", "reduce_scatter"):
        return ring
    if kind == "all_reduce":
        once = link.latency_s + size_bytes / link.bytes_per_s / 2 if adds_up(link) else inf
        return 2 * min(ring, depth + size_bytes / link.bytes_per_s, once)
    return depth + (size_bytes / link.bytes_per_s if kind == "broadcast" else share)


def _two_levels(kind: str, size_bytes: float, local: int, nodes: int, intra: Link, inter: Link) -> float:
    """Rings and trees over nodes of `local` ranks each; an all-to-all takes both kinds of links at once."""
    if kind == "all_to_all":
        on_rails = isinstance(inter, Fabric) and inter.rails
        inside = one_link_seconds(kind, size_bytes if on_rails else size_bytes / nodes, local, intra)
        outside = one_link_seconds(kind, size_bytes, nodes, inter)
        return max(inside, outside)
    ranks = local * nodes
    within, between = size_bytes / intra.bytes_per_s, size_bytes / (local * inter.bytes_per_s)
    depth = ceil(log2(nodes)) * inter.latency_s + ceil(log2(local)) * intra.latency_s
    if kind == "broadcast":
        return depth + max(within, between)
    around = (nodes - 1) * inter.latency_s + (ranks - nodes) * intra.latency_s
    ring = around + (ranks - 1) / ranks * max(within, between)
    if kind != "all_reduce":
        return ring
    twice = 1 if adds_up(intra) else 2
    trees = 2 * depth + max(twice * within, between * (1 if nodes == 2 else 2))
    if not adds_up(inter):
        return min(2 * ring, trees)
    once = 2 * (inter.latency_s + ceil(log2(local)) * intra.latency_s) + max(twice * within, between)
    return min(2 * ring, trees, once)
