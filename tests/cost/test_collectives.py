from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Link
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
