"""Device meshes: which factorisations of the devices the search looks at, and the mesh of a hand-written plan."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

from autopar.cluster import Cluster
from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig
from autopar.plan import MeshAxis, prime_sizes


def mesh_of(sizes: tuple[int, ...]) -> tuple[MeshAxis, ...]:
    """Axes of the given sizes over neighbouring ranks, row-major, without sizes of 1: one device has no axis."""
    kept = tuple(s for s in sizes if s > 1)
    strides = [prod(kept[i + 1 :]) for i in range(len(kept))]
    return tuple(MeshAxis(f"d{i}", size, stride) for i, (size, stride) in enumerate(zip(kept, strides, strict=True)))


def search_meshes(cluster: Cluster, devices: int) -> tuple[tuple[MeshAxis, ...], ...]:
    """Meshes of one stage over `devices`: every two-axis factorisation whose inner axis stays near a node.

    The inner axis holds neighbouring ranks, so tensor splits there stay inside a node; per layer the search gives each
    axis to whatever factor pays, hence an (n, t) mesh also holds every plan with both axes on one factor.
    """
    inner = [t for t in range(1, devices + 1) if devices % t == 0 and t <= 2 * cluster.devices_per_node]
    return tuple(dict.fromkeys(mesh_of((devices // t, t)) for t in inner))


def finer_sizes(sizes: tuple[int, ...], pinned: bool, cluster: Cluster) -> tuple[tuple[int, int, int], ...]:
    """Sizes next to those of a mesh: of an axis for the batch, which may be 1, and two free ones longer than that.

    One prime factor is on another axis. The first of two axes may be the one for the batch (`pinned`: it is) or free.
    The innermost axis stays near a node; free axes inside a node are interchangeable, the longer comes first.
    """
    starts: list[tuple[int, ...]] = [sizes] if len(sizes) == 3 else []
    if len(sizes) == 2:
        starts.append((sizes[0], 1, sizes[1]))
    if len(sizes) < 3 and not pinned:
        starts.append((1,) * (3 - len(sizes)) + sizes)
    found = dict[tuple[int, int, int], None]()
    for start, (source, target) in product(starts, permutations(range(3), 2)):
        for factor in dict.fromkeys(prime_sizes((start[source],))):
            moved = list(start)
            moved[source] //= factor
            moved[target] *= factor
            data, outer, inner = moved
            if cluster.devices_per_node % (outer * inner) == 0:
                outer, inner = max(outer, inner), min(outer, inner)
            if min(outer, inner) > 1 and inner <= 2 * cluster.devices_per_node:
                found[data, outer, inner] = None
    return tuple(found)


def node_sizes(sizes: tuple[int, ...], pinned: bool, cluster: Cluster) -> tuple[tuple[int, int, int], ...]:
    """Sizes of meshes over as many devices on which axes are either inside a node or between nodes: that of the batch
    or (where it isn't `pinned` in `sizes`) one free axis between them, inside as many ways as in `sizes`, and one axis.
    """
    devices, node = prod(sizes), cluster.devices_per_node
    if devices <= node or devices % node:
        return ()
    nodes, inner = devices // node, sizes[-1]
    found = [(nodes, 1, node) if pinned else (1, nodes, node)]
    if 1 < inner < node and node % inner == 0:
        found.append((nodes, node // inner, inner))
    return tuple(found)


def config_mesh(config: ManualConfig, blocks: int) -> tuple[MeshAxis, ...]:
    """The mesh of a hand-written plan's stages, so fine that every block's tensor degree is a product of inner axes.

    Outside it are those that split the sequence, then the samples. So fine it is, too, that experts and groups of ZeRO
    lie on whole axes: experts on the innermost outside the tensor degree, groups outside the sequence.
    """
    devices = config.devices // config.pp
    own = [config, *(config.for_block(i, config.devices) for i in range(blocks))]
    whole = {c.tp * c.cp for c in own}
    groups = {c.tp * c.cp * int(c.zero_group) for c in own if c.zero_group != "all"}
    degrees = sorted({c.tp for c in own} | whole | {c.tp * c.ep for c in own} | groups)
    sizes, inner = [], 1
    for degree in [*degrees, devices]:
        if degree % inner:
            raise ConfigError(
                f"tp, tp*cp, tp*ep and tp*cp*zero_group of all layers, {degrees} on {devices} devices, must each "
                "divide the next; give such degrees"
            )
        sizes.append(degree // inner)
        inner = degree
    return mesh_of(tuple(reversed(sizes)))


def inner_axes(mesh: tuple[MeshAxis, ...], degree: int) -> frozenset[int]:
    """Indices of the innermost axes whose sizes multiply to `degree`."""
    chosen, product = set(), 1
    for i in reversed(range(len(mesh))):
        if product >= degree:
            break
        product *= mesh[i].size
        chosen.add(i)
    if product != degree:
        raise ConfigError(f"a degree of {degree} is no product of inner axes of the mesh {[a.size for a in mesh]}")
    return frozenset(chosen)
