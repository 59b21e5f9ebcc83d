"""Cluster files: equal nodes, or groups of nodes that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from autopar.cluster.device_file import Count, LinkFile, Positive
from autopar.cluster.devices import find_device
from autopar.cluster.records import Cluster, MixedCluster, Wires, mixed_cluster
from autopar.errors import ConfigError
from autopar.settings import Refused, Settings

Table: TypeAlias = tuple[tuple[float, ...], ...]


class Nodes(Settings):
    """Equal nodes of one device; what isn't given is as for the device's usual node.

    `power_w` and `price_per_hour` (in any currency) are those of one device with its share of the node.
    """

    device: str
    nodes: Count
    devices_per_node: Count
    intra: LinkFile | None = None
    inter: LinkFile | None = None
    power_w: Positive | None = None
    price_per_hour: Positive | None = None

    @field_validator("device")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            find_device(name)
        except ConfigError as error:
            raise Refused(*error.mistakes) from None
        return name

    @field_validator("intra")
    @classmethod
    def _inside(cls, link: LinkFile | None) -> LinkFile | None:
        if link is not None and (link.rails or link.pod_nodes):
            raise Refused("rails and pod_nodes are of links between nodes; give them in [inter]")
        return link

    def equal_nodes(self, name: str) -> Cluster:
        """The nodes with their device looked up."""
        found = find_device(self.device)
        intra, inter = self.intra or found.intra, self.inter or found.inter
        power_w, price = self.power_w or found.power_w, self.price_per_hour or found.price_per_hour
        device = replace(found.device(), power_w=power_w, price_per_hour=price)
        return Cluster(name, device, self.nodes, self.devices_per_node, intra.link(), inter.link())


class ClusterFile(Nodes):
    """A cluster of equal nodes."""

    name: str
    sources: dict[str, str] = Field(default_factory=dict)

    def cluster(self) -> Cluster:
        """The cluster in base units."""
        return self.equal_nodes(self.name)


# --- nodes that differ ----------------------------------------------------------------------------------------------


class GroupTable(Nodes):
    """`[[group]]`: nodes of one device in a mixed cluster.

    `speed`: at what multiple of their kind's pace its devices work, one number or one for each device. `network` names
    what its nodes are joined by; by default the name of the link between them.
    """

    speed: Annotated[
        tuple[Positive, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list | tuple) else (v,))
    ] = (1.0,)
    network: str = ""

    @model_validator(mode="after")
    def _speeds(self) -> GroupTable:
        count = self.nodes * self.devices_per_node
        if len(self.speed) not in (1, count):
            raise ValueError(f"speed has {len(self.speed)} numbers; give one, or one for each of {count} devices")
        return self

    def parts(self, name: str) -> Iterator[Cluster]:
        """Neighbouring nodes of equal speed; a node works at the pace of its slowest device."""
        whole = self.equal_nodes(name)
        whole = replace(whole, network=self.network or whole.inter.name)
        each = self.speed * (1 if len(self.speed) > 1 else whole.devices)
        size = whole.devices_per_node
        for speed, nodes in groupby(min(each[n * size : (n + 1) * size]) for n in range(self.nodes)):
            yield replace(whole, device=replace(whole.device, speed=speed), nodes=len(list(nodes)))


class WiresTable(Settings):
    """`[wires]`: files (relative to the cluster's) of one line a node with the figures of its links to each node,
    separated by commas: microseconds, and GB/s per device one way, as reached."""

    latency_us: str
    gb_per_s: str

    @field_validator("latency_us", "gb_per_s")
    @classmethod
    def _readable(cls, file: str, info: ValidationInfo) -> str:
        path = (info.context or {}).get("folder", Path()) / file
        _read_table(path)
        return str(path)

    def wires(self) -> Wires:
        """The links in base units."""
        latency, rate = _read_table(Path(self.latency_us)), _read_table(Path(self.gb_per_s))
        return Wires(_scaled(latency, 1e-6), _scaled(rate, 1e9))


class MixedFile(Settings):
    """A cluster of groups of nodes that differ. `between` joins nodes of different networks."""

    name: str
    group: Annotated[tuple[GroupTable, ...], Field(min_length=1, strict=False)]
    between: LinkFile | None = None
    wires: WiresTable | None = None
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _joined(self) -> MixedFile:
        nodes = sum(group.nodes for group in self.group)
        networks = list(dict.fromkeys(part.network for part in self._parts()))
        if self.wires is not None:
            wires = self.wires.wires()
            lengths = {len(wires.latency_s), len(wires.bytes_per_s)}
            if lengths != {nodes}:
                raise ValueError(
                    f"wires have {sorted(lengths)} lines; give one for each of {nodes} nodes in all groups"
                )
        elif len(networks) > 1 and self.between is None:
            raise ValueError(f"networks {', '.join(networks)} aren't joined; add a table [between], or [wires]")
        backends = {part.device.backend for part in self._parts()}
        if len(backends) > 1:
            raise ValueError(f"devices of backends {', '.join(sorted(backends))} can't train together; give one kind")
        return self

    def _parts(self) -> list[Cluster]:
        return [part for number, group in enumerate(self.group) for part in group.parts(f"{self.name} {number}")]

    def cluster(self) -> Cluster:
        """The cluster in base units; an ordinary one where all nodes are equal after all."""
        parts = self._parts()
        if len(parts) == 1 and self.wires is None:
            return replace(parts[0], name=self.name, network="")
        between = None if self.between is None else self.between.link()
        found: MixedCluster = mixed_cluster(self.name, parts, between, self.wires.wires() if self.wires else None)
        return found


def _read_table(path: Path) -> Table:
    """The numbers of a file; raises ValueError with what is wrong unless they are as many in each line as lines."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        table = tuple(tuple(float(cell) for cell in line.split(",")) for line in lines)
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror}); give a file beside the cluster's") from None
    except ValueError as error:
        raise ValueError(f"{error}; give lines of numbers separated by commas") from None
    odd = [len(row) for row in table if len(row) != len(table)]
    if odd or not table:
        raise ValueError(f"{len(table)} lines, one with {max(odd, default=0)} numbers; give as many of both as nodes")
    bad = [x for i, row in enumerate(table) for j, x in enumerate(row) if i != j and not (isfinite(x) and x > 0)]
    if bad:
        raise ValueError(f"{bad[0]} stands between two nodes; give a positive number (only the diagonal is free)")
    return table


def _scaled(table: Sequence[Sequence[float]], unit: float) -> Table:
    return tuple(tuple(x * unit for x in row) for row in table)
