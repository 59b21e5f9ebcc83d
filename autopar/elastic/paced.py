"""A cluster some of whose devices are slower than the rest of their kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autopar.cluster import Cluster, MixedCluster, Wires, mixed_cluster
from autopar.plan import PlanRecord


@dataclass(frozen=True)
class Paced:
    """A cluster with its devices regrouped by pace; `numbers[d]` is the number that its device d had before."""

    cluster: Cluster
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _Piece:
    """Devices of one node that work at one pace, as a node of their own."""

    part: Cluster
    node: int
    speed: float
    devices: tuple[int, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        return self.part.first_device, self.speed, len(self.devices)


def paced(cluster: Cluster, speeds: Sequence[float]) -> Paced:
    """`cluster` with device d at `speeds[d]` times its usual pace.

    Nodes whose devices differ become several, of 1, 2, 4, ... devices, so that groups of devices can keep to equal
    ones. Their links are those between nodes of the cluster (inside the node where it is the only one).
    """
    if all(speed == 1.0 for speed in speeds):
        return Paced(cluster, tuple(range(cluster.devices)))
    pieces = sorted(_pieces(cluster, speeds), key=lambda p: (p.part.first_device, -p.speed, -len(p.devices)))
    parts = [_part(list(alike), cluster) for _, alike in groupby(pieces, key=lambda piece: piece.kind)]
    between, wires = (cluster.between, cluster.wires) if isinstance(cluster, MixedCluster) else (None, None)
    if wires is not None:
        wires = _rewired(wires, pieces)
    numbers = tuple(d for piece in pieces for d in piece.devices)
    return Paced(mixed_cluster(cluster.name, parts, between, wires), numbers)


def _pieces(cluster: Cluster, speeds: Sequence[float]) -> Iterator[_Piece]:
    for node, (part, devices) in enumerate(_nodes(cluster)):
        own = {speeds[d] for d in devices}
        for speed in own:
            alike = [d for d in devices if speeds[d] == speed]
            while alike:
                size = len(alike) if len(own) == 1 else 1 << (len(alike).bit_length() - 1)
                yield _Piece(part, node, speed, tuple(alike[:size]))
                alike = alike[size:]


def _nodes(cluster: Cluster) -> Iterator[tuple[Cluster, range]]:
    """Each node with the part that it is of."""
    for part in cluster.parts if isinstance(cluster, MixedCluster) else (cluster,):
        for number in range(part.nodes):
            first = part.first_device + number * part.devices_per_node
            yield part, range(first, first + part.devices_per_node)


def _part(pieces: Sequence[_Piece], cluster: Cluster) -> Cluster:
    """Equal pieces as equal nodes."""
    part, speed = pieces[0].part, pieces[0].speed
    return replace(
        part,
        device=replace(part.device, speed=part.device.speed * speed),
        nodes=len(pieces),
        devices_per_node=len(pieces[0].devices),
        inter=part.intra if cluster.nodes == 1 else part.inter,
        network=part.network or part.inter.name,
    )


def _rewired(wires: Wires, pieces: Sequence[_Piece]) -> Wires:
    """The links between pieces: those of their nodes, or inside one."""

    def table(figures: tuple[tuple[float, ...], ...], name: str) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(
                figures[a.node][b.node] if a.node != b.node else float(getattr(a.part.intra, name))
                for b in pieces
            )
            for a in pieces
        )  # fmt: skip

    return Wires(table(wires.latency_s, "latency_s"), table(wires.bytes_per_s, "bytes_per_s"))


# --- plans on it ----------------------------------------------------------------------------------------------------


def device_numbers(record: PlanRecord, cluster: Cluster) -> tuple[int, ...]:
    """The device of `cluster` that each rank of a running plan is: on a mixed one as the plan was placed."""
    if not isinstance(cluster, MixedCluster):
        return tuple(range(cluster.devices))
    rest = [d for d in range(cluster.devices) if d not in {*record.placement}]
    return (*record.placement, *rest)


def numbered(record: PlanRecord, numbers: Mapping[int, int]) -> PlanRecord:
    """A running plan placed on the devices that its ranks are: rank r is device `numbers[r]`."""
    groups = record.stages[: record.pp_degree]
    return replace(record, placement=tuple(numbers[rank] for group in groups for rank in group.devices))


def for_ranks(record: PlanRecord, ranks: Mapping[int, int]) -> PlanRecord:
    """A new plan for ranks that run already: device d is rank `ranks[d]`; `placement` then names ranks."""
    stages = tuple(
        replace(stage, devices=tuple(sorted(ranks[record.placement[position]] for position in stage.devices)))
        for stage in record.stages
    )
    placement = tuple(rank for stage in stages[: record.pp_degree] for rank in stage.devices)
    return replace(record, stages=stages, placement=placement)
