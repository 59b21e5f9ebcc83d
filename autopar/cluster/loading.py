"""Clusters by name or file, and changed ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from autopar.cluster.cluster_file import ClusterFile, MixedFile
from autopar.cluster.devices import SIZED, all_devices, profiles_folder
from autopar.cluster.records import Cluster, Link, MixedCluster, mixed_cluster
from autopar.errors import ConfigError
from autopar.settings import check_settings, near, read_toml

WHAT_IF = ("network", "memory", "compute")
"""What `what_if` can scale: the links between nodes, the usable bytes, the peak rates."""
AnyFile: TypeAlias = ClusterFile | MixedFile


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
    return _read(path).cluster()


@cache
def shipped_clusters() -> tuple[AnyFile, ...]:
    """The clusters that come with autopar."""
    return tuple(_read(path) for path in sorted((profiles_folder() / "clusters").glob("*.toml")))


def _read(path: Path) -> AnyFile:
    """A file with groups is that of a mixed cluster."""
    data = read_toml(path)
    record: type[AnyFile] = MixedFile if "group" in data else ClusterFile
    return check_settings(data, record, str(path), path.parent)


def what_if(cluster: Cluster, text: str) -> Cluster:
    """The cluster with what `network=0.8,memory=0.9` names scaled (see `WHAT_IF`); raises ConfigError."""
    pairs = [item.partition("=") for item in text.split(",")]
    scales = {key.strip(): _factor(value) for key, _, value in pairs}
    bad = [f"{key}={value}" for key, _, value in pairs if key.strip() not in WHAT_IF or not _factor(value)]
    if bad:
        allowed = ", ".join(WHAT_IF)
        raise ConfigError(f"what-if {', '.join(bad)}: give positive factors for {allowed}, such as network=0.8")
    factors = [scales.get(key, 1.0) for key in WHAT_IF]
    return replace(_scaled(cluster, *factors), name=f"{cluster.name} with {text}")


def _scaled(cluster: Cluster, network: float, memory: float, compute: float) -> Cluster:
    if isinstance(cluster, MixedCluster):
        parts = [_scaled(part, network, memory, compute) for part in cluster.parts]
        between = None if cluster.between is None else _faster(cluster.between, network)
        wires = cluster.wires
        if wires is not None:
            wires = replace(wires, bytes_per_s=tuple(tuple(r * network for r in row) for row in wires.bytes_per_s))
        return mixed_cluster(cluster.name, parts, between, wires)
    device = replace(
        cluster.device,
        usable_bytes=int(cluster.device.usable_bytes * memory),
        peak_flops_per_s={k: v * compute for k, v in cluster.device.peak_flops_per_s.items()},
    )
    return replace(cluster, device=device, inter=_faster(cluster.inter, network))


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


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
