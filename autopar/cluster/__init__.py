"""Devices, links and clusters, read from TOML or built from a name."""

from autopar.cluster.cluster_file import ClusterFile, MixedFile
from autopar.cluster.device_file import DTYPES, DeviceFile, LinkFile
from autopar.cluster.devices import (
    add_device,
    all_devices,
    device_from_figures,
    find_device,
    profiles_folder,
    same_device,
)
from autopar.cluster.loading import load_cluster, read_cluster, shipped_clusters, what_if
from autopar.cluster.records import (
    Cluster,
    Device,
    Fabric,
    Link,
    MixedCluster,
    Wires,
    adds_up,
    device_of,
    mixed_cluster,
    slower,
)

__all__ = [
    "DTYPES",
    "Cluster",
    "ClusterFile",
    "Device",
    "DeviceFile",
    "Fabric",
    "Link",
    "LinkFile",
    "MixedCluster",
    "MixedFile",
    "Wires",
    "add_device",
    "adds_up",
    "all_devices",
    "device_from_figures",
    "device_of",
    "find_device",
    "load_cluster",
    "mixed_cluster",
    "profiles_folder",
    "read_cluster",
    "same_device",
    "shipped_clusters",
    "slower",
    "what_if",
]
