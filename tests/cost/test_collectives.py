from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Fabric, Link
from autopar.cost.collectives import KINDS, collective_seconds, collective_times, one_link_seconds, ranks_by_level
from autopar.cost.moves import group_of
from autopar.errors import ConfigError
from autopar.graph import CollectiveKey
from autopar.plan import MeshAxis
from tests.cost.small import cluster

LINK = Link("round", 1e9, 1e-6)
MB = 10**6


def seconds(kind: str, size: int, ranks: int, stride: int = 1, per_node: int = 4) -> float:
    return float(collective_times([CollectiveKey(kind, size, ranks, stride)], cluster(4, per_node)).seconds[0])


def test_ring_on_one_link() -> None:
    """8 MB over 4 ranks at 1 GB/s: three steps of 1 us and three quarters of 8 ms; the all-reduce both ways."""
    assert one_link_seconds("all_gather", 8 * MB, 4, LINK) == pytest.approx(3e-6 + 6e-3)
    assert one_link_seconds("reduce_scatter", 8 * MB, 4, LINK) == pytest.approx(3e-6 + 6e-3)
    assert one_link_seconds("all_reduce", 8 * MB, 4, LINK) == pytest.approx(6e-6 + 12e-3)
    assert one_link_seconds("all_to_all", 8 * MB, 4, LINK) == pytest.approx(2e-6 + 6e-3)
    assert one_link_seconds("broadcast", 8 * MB, 4, LINK) == pytest.approx(2e-6 + 8e-3)


def test_small_all_reduce_takes_the_tree() -> None:
    """Eight bytes over 64 ranks: twice six steps of 1 us instead of twice 63."""
    assert one_link_seconds("all_reduce", 8, 64, LINK) == pytest.approx(12e-6, rel=1e-2)


def test_levels_of_a_group() -> None:
    """Ranks of a node and nodes, by stride, on nodes of eight."""
    assert ranks_by_level(8, 1, 8) == (8, 1)
    assert ranks_by_level(4, 2, 8) == (4, 1)
    assert ranks_by_level(16, 1, 8) == (8, 2)
    assert ranks_by_level(8, 2, 8) == (4, 2)
    assert ranks_by_level(4, 8, 8) == (1, 4)


def test_groups_that_lie_across_nodes() -> None:
    """Of three groups of six on nodes of eight one lies across two nodes: never quicker than the same inside one."""
    assert ranks_by_level(6, 1, 8) == (3, 2)
    assert seconds("all_reduce", 8 * MB, 3) > one_link_seconds("all_reduce", 8 * MB, 3, cluster(4, 4).intra)
    one_node = collective_times([CollectiveKey("all_reduce", 8 * MB, 3)], cluster(1, 4)).seconds[0]
    assert float(one_node) == pytest.approx(one_link_seconds("all_reduce", 8 * MB, 3, cluster(1, 4).intra))


def test_gather_over_nodes_goes_round() -> None:
    """8 ranks on two nodes of 4: a ring of one hop of 10 us and six of 1 us; 7/8 of 8 MB over four links of 1 GB/s."""
    assert seconds("all_gather", 8 * MB, 8) == pytest.approx(1e-5 + 6e-6 + 7 / 8 * 2e-3)


def test_sum_over_two_nodes_takes_trees_and_over_more_the_ring() -> None:
    """Over two nodes all 8 MB leave each node once, over four 15/16 of them twice."""
    assert seconds("all_reduce", 8 * MB, 8) == pytest.approx(2 * (1e-5 + 2e-6) + 2e-3)
    assert seconds("all_reduce", 8 * MB, 16) == pytest.approx(2 * (3e-5 + 12e-6 + 15 / 16 * 2e-3))


def test_sums_over_nodes_as_measured() -> None:
    """Bus rates of 1 GB sums on nodes of 4 GH200 with 25 GB/s each (Alps): 149 GB/s on 2 nodes, 92 on 4 and 8."""
    intra, inter = Link("nvlink", 340e9, 3e-6), Link("slingshot", 25e9, 5e-6)
    for nodes, measured in ((2, 149e9), (4, 92e9), (8, 91e9)):
        ranks = 4 * nodes
        took_s = collective_seconds(CollectiveKey("all_reduce", 10**9, ranks), 4, intra, inter)
        assert 2 * (ranks - 1) / ranks * 1e9 / took_s == pytest.approx(measured, rel=0.2)


def test_group_of_one_rank_a_node_uses_the_far_link() -> None:
    """Four ranks with stride 4 on nodes of 4 see only the link between nodes."""
    assert seconds("all_gather", 8 * MB, 4, 4) == pytest.approx(3e-5 + 0.75 * 8e-3)


@given(st.sampled_from(KINDS), st.integers(1, 1 << 30), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_more_bytes_take_no_less(kind: str, size: int, ranks: int, stride: int) -> None:
    """Seconds are positive, grow with bytes and are finite for every group that fits."""
    if ranks * stride > 16:
        return
    assert 0 < seconds(kind, size, ranks, stride) <= seconds(kind, 2 * size, ranks, stride)


NEAR = Link("near", 1e10, 1e-6)


def over(kind: str, ranks: int, stride: int = 1, **known: Any) -> float:
    """Seconds of 8 MB over nodes of four that 1 GB/s a device joins, of which more is `known`."""
    fabric = Fabric("far", 1e9, 1e-5, **known)
    return collective_seconds(CollectiveKey(kind, 8 * MB, ranks, stride), 4, NEAR, fabric)


def test_sums_in_switches_send_each_byte_once() -> None:
    """8 MB up and down once: in two messages on one link; from a node over its four links, with two hops inside each
    way; and 0.8 ms there and as much back inside bound what links between nodes don't. Other kinds are as ever."""
    assert one_link_seconds("all_reduce", 8 * MB, 64, Fabric("sharp", 1e9, 1e-6, in_switch=True)) == pytest.approx(
        2e-6 + 8e-3
    )
    assert over("all_reduce", 4, 4, in_switch=True) == pytest.approx(2e-5 + 8e-3)
    assert over("all_reduce", 16, in_switch=True) == pytest.approx(2 * (1e-5 + 2e-6) + 2e-3)
    assert over("all_reduce", 4096, in_switch=True) == pytest.approx(2 * (1e-5 + 2e-6) + 2e-3)
    near = Fabric("near", 1e9, 1e-6, in_switch=True)
    far = Fabric("far", 1e9, 1e-5, in_switch=True)
    assert collective_seconds(CollectiveKey("all_reduce", 8 * MB, 16), 4, near, far) == pytest.approx(2.4e-5 + 8e-3)
    assert over("all_gather", 16, in_switch=True) == over("all_gather", 16)


def test_pods_are_a_third_level() -> None:
    """Pods of two nodes, joined at an eighth of the rate: 15/16 of 8 MB pass a pod's edge once for all eight ranks in
    it, as fast as a node's edge for four at half the rate. One rank a pod gets the eighth, those of one pod all."""
    pods: dict[str, Any] = {"pod_nodes": 2, "spine_share": 0.125}
    around = 3e-5 + 12e-6
    assert over("all_gather", 16, **pods) == pytest.approx(around + 15 / 16 * 8e-3 / (8 * 0.125))
    assert over("all_gather", 16, pod_nodes=2, spine_share=0.5) == over("all_gather", 16)
    assert over("all_gather", 4, 8, **pods) == pytest.approx(3e-5 + 3 / 4 * 8e-3 * 8)
    assert over("all_gather", 2, 4, **pods) == over("all_gather", 2, 4)
    assert over("all_to_all", 8, 4, **pods) == pytest.approx(3e-5 + 3 / 4 * 8e-3 * 8)


def test_rails_reach_other_numbers_by_way_of_the_node() -> None:
    """Groups of equal numbers, and those that fill their nodes' rails, stay on them. Devices six apart on nodes of four
    take a hop inside more a message; an all-to-all moves three quarters of 8 MB inside first, instead of of 2 MB."""
    for kind, ranks, stride in (("all_reduce", 8, 4), ("all_gather", 16, 1), ("reduce_scatter", 4, 2)):
        assert over(kind, ranks, stride, rails=True) == over(kind, ranks, stride)
    assert over("all_gather", 4, 6, rails=True) == pytest.approx(over("all_gather", 4, 6) + 3e-6)
    fast = Fabric("far", 1e11, 1e-5, rails=True)
    taken = collective_seconds(CollectiveKey("all_to_all", 8 * MB, 16), 4, NEAR, fast)
    assert taken == pytest.approx(2e-6 + 3 / 4 * 8e-4)


def test_groups_at_once_share_the_adapters() -> None:
    """One group of all devices and four of one device a node each move as much over a node's edge, in the same time."""
    whole, parts = over("all_gather", 16), over("all_gather", 4, 4)
    assert whole - 3e-5 - 12e-6 == pytest.approx(15 / 16 * 2e-3)
    assert parts - 3e-5 == pytest.approx(3 / 4 * 8e-3)  # of 8 MB each, four times 8 MB in all


def test_groups_that_cost_nothing() -> None:
    """One rank, or no bytes, take no time."""
    assert seconds("all_reduce", MB, 1) == 0
    assert seconds("all_reduce", 0, 8) == 0


def test_unknown_kind_is_named() -> None:
    """The error names the kind and what is allowed."""
    with pytest.raises(ConfigError, match=r"'gossip'.*all_reduce"):
        seconds("gossip", 1, 2)


def test_group_over_axes_that_are_not_neighbours() -> None:
    """Axes of strides 8 and 1 around another: 8 ranks that span 16 devices, four of them in a node of eight."""
    mesh = [MeshAxis("d0", 2, 8), MeshAxis("d1", 2, 4), MeshAxis("d2", 4, 1)]
    assert group_of((0, 2), mesh) == (8, 2)
    assert group_of((1, 2), mesh) == (8, 1)
    assert group_of((0,), mesh) == (2, 8)
