"""Prices on a mixed cluster: on the nodes that a group of devices has, or on all, each step as slow as the slowest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import gcd

import numpy as np

from autopar.cluster import Cluster, Link, MixedCluster, slower
from autopar.cost.collectives import collective_times
from autopar.cost.pricer import CollectiveTimes, OpTimes, Pricer
from autopar.graph import CollectiveKey, OpKey


@dataclass(frozen=True, eq=False)
class SlowestPricer:
    """Devices that differ and work in step: each operator takes what it takes the slowest of them.

    `cluster`: what they have in common: the least memory, the slowest links.
    """

    pricers: tuple[Pricer, ...]
    cluster: Cluster

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Those of all."""
        return tuple(dict.fromkeys(said for pricer in self.pricers for said in pricer.assumptions))

    def identity(self) -> str:
        """Hash of all prices and links."""
        text = " ".join([*(pricer.identity() for pricer in self.pricers), repr(self.cluster)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op on the device it takes longest."""
        each = [pricer.ops(keys) for pricer in self.pricers]
        forward, backward = (np.stack([getattr(t, f"{way}_s") for t in each]) for way in ("forward", "backward"))
        slowest = (forward + backward).argmax(axis=0)
        return OpTimes(forward.max(axis=0), backward.max(axis=0), [each[s].sources[i] for i, s in enumerate(slowest)])

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective over the slowest links, in closed form."""
        return collective_times(keys, self.cluster)


@dataclass(frozen=True, eq=False)
class PacedPricer:
    """Prices where devices work at another pace than those that `usual` knows: at `cluster.device.speed` times it."""

    usual: Pricer
    cluster: Cluster

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Those of the usual prices."""
        return self.usual.assumptions

    def identity(self) -> str:
        """Hash of the usual prices and the pace."""
        return hashlib.sha256(f"{self.usual.identity()} {self.cluster!r}".encode()).hexdigest()[:16]

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op at that pace."""
        found, speed = self.usual.ops(keys), self.cluster.device.speed
        return OpTimes(found.forward_s / speed, found.backward_s / speed, found.sources)

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective: the usual ones."""
        return self.usual.collectives(keys)


@dataclass(frozen=True, eq=False)
class MixedPricer:
    """Prices on parts of a mixed cluster; asked as a pricer itself, of all devices in step. `alone` prices one part."""

    cluster: MixedCluster
    alone: Callable[[Cluster], Pricer]
    _known: dict[tuple[tuple[Cluster, ...], Link], Pricer] = field(default_factory=dict, repr=False)

    def on(self, parts: Sequence[Cluster], inter: Link) -> Pricer:
        """Prices of a group of devices that has nodes of these parts, joined by `inter`."""
        kinds = tuple(dict.fromkeys(replace(p, name=self.cluster.name, first_device=0, nodes=0) for p in parts))
        if (kinds, inter) not in self._known:
            sites = [replace(kind, inter=inter, nodes=self.cluster.nodes) for kind in kinds]
            pricers = tuple(self.alone(site) for site in sites)
            found = pricers[0] if len(pricers) == 1 else SlowestPricer(pricers, _common(sites))
            self._known[kinds, inter] = found
        return self._known[kinds, inter]

    @property
    def in_step(self) -> Pricer:
        """Prices of all devices in step."""
        return self.on(self.cluster.parts, self.cluster.inter)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Those of all parts."""
        return self.in_step.assumptions

    def identity(self) -> str:
        """Hash of all parts' prices and of how they are joined."""
        text = f"{self.in_step.identity()} {self.cluster!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op on the device it takes longest."""
        return self.in_step.ops(keys)

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective over the slowest links."""
        return self.in_step.collectives(keys)


def _common(sites: Sequence[Cluster]) -> Cluster:
    """What clusters have in common."""
    devices = [site.device for site in sites]
    tightest = min(devices, key=lambda device: device.limit_bytes(None))
    device = replace(
        tightest, name=" + ".join(dict.fromkeys(d.name for d in devices)), overlap=min(d.overlap for d in devices)
    )
    intra, inter = (reduce(slower, links) for links in ([s.intra for s in sites], [s.inter for s in sites]))
    per_node = gcd(*(site.devices_per_node for site in sites))
    return replace(sites[0], device=device, devices_per_node=per_node, intra=intra, inter=inter)
