"""Clusters with slow devices, and plans between them and the ranks of a job that runs."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import Cluster, Link, MixedCluster, Wires, load_cluster, mixed_cluster
from autopar.cost.mixed import MixedPricer
from autopar.cost.roofline import RooflinePricer
from autopar.elastic.paced import device_numbers, for_ranks, numbered, paced
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.formulate.record.recost import recost
from tests.formulate.cases import planner, traced


def slow(cluster: Cluster, *devices: int) -> tuple[MixedCluster, tuple[int, ...]]:
    """The cluster with some of its devices at half speed."""
    found = paced(cluster, [0.5 if d in devices else 1.0 for d in range(cluster.devices)])
    assert isinstance(found.cluster, MixedCluster)
    return found.cluster, found.numbers


def pieces(cluster: MixedCluster) -> list[tuple[int, int, float]]:
    return [(part.nodes, part.devices_per_node, part.device.speed) for part in cluster.parts]


def test_a_slow_device_of_one_node() -> None:
    """Seven of eight devices are nodes of 4, 2 and 1, joined as they are inside the node; each is there once."""
    cluster = load_cluster("8xa100-80gb")
    found, numbers = slow(cluster, 2)
    assert pieces(found) == [(1, 4, 1.0), (1, 2, 1.0), (1, 1, 1.0), (1, 1, 0.5)]
    assert numbers == (0, 1, 3, 4, 5, 6, 7, 2)
    assert {part.inter for part in found.parts} == {cluster.intra}


def test_whole_nodes_stay_whole() -> None:
    """Of four nodes the one with a slow device comes apart; three stay as they are, joined by the network."""
    found, numbers = slow(load_cluster("4x8xa100-80gb"), 9)
    assert pieces(found) == [(3, 8, 1.0), (1, 4, 1.0), (1, 2, 1.0), (1, 1, 1.0), (1, 1, 0.5)]
    assert sorted(numbers) == list(range(32))
    assert numbers[-1] == 9
    assert found.link(0, 1) == load_cluster("4x8xa100-80gb").inter


def test_nothing_slow_is_the_cluster_itself() -> None:
    """With all devices at their usual pace nothing changes."""
    cluster = load_cluster("8xa100-80gb")
    assert paced(cluster, [1.0] * 8).cluster is cluster


def test_wires_follow_the_nodes() -> None:
    """Pieces of a node have its links to others, and those inside a node among each other."""
    node = replace(load_cluster("2xa100-80gb"), network="x")
    wires = Wires(((0.0, 7e-6), (7e-6, 0.0)), ((0.0, 3e9), (3e9, 0.0)))
    found, numbers = slow(mixed_cluster("ours", [node, node], Link("between", 1e9, 1e-5), wires), 1)
    assert numbers == (0, 1, 2, 3)
    assert found.link(0, 1).bytes_per_s == node.intra.bytes_per_s
    assert found.link(0, 2).bytes_per_s == found.link(1, 2).bytes_per_s == 3e9


def test_a_new_plan_spares_the_slow_rank() -> None:
    """Plans of equal ranks take longer than before, the new one less than any; the slow rank has fewer layers."""
    found, numbers = slow(load_cluster("4xa100-80gb"), 2)
    pricer = MixedPricer(found, RooflinePricer)
    usual = planner("gpt-40", "4xa100-80gb", 8)
    new = Planner(traced("gpt-40"), found, pricer, usual.request).plan()
    for text in ("pp=4", "dp=4", "pp=2,dp=2"):
        running = usual.estimate(ManualConfig.parse(text))
        old = recost(numbered(running, {rank: numbers.index(rank) for rank in range(4)}), pricer)
        assert old.step_time_s > 1.2 * running.step_time_s
        assert new.step_time_s < old.step_time_s
    stages = for_ranks(new, dict(enumerate(numbers))).stages
    held = {r: sum(len(s.assignment) for s in stages if r in s.devices) for r in range(4)}
    assert held[2] < max(held.values())


def test_ranks_of_a_placed_plan() -> None:
    """On a mixed cluster ranks are the devices a plan was placed on, then those that it leaves idle."""
    node = replace(load_cluster("2xa100-80gb"), network="x")
    mixed = mixed_cluster("ours", [node, node], None)
    running = planner("gpt-40", "4xa100-80gb", 8).estimate(ManualConfig(pp=2, devices=2))
    assert device_numbers(replace(running, placement=(3, 1)), mixed) == (3, 1, 0, 2)
    assert device_numbers(running, load_cluster("4xa100-80gb")) == (0, 1, 2, 3)
