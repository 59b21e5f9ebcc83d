"""Cluster files whose nodes differ, and the mistakes people make in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cluster import Cluster, MixedCluster, device_of, load_cluster, what_if
from autopar.errors import ConfigError

GROUP = '[[group]]\ndevice = "{device}"\nnodes = {nodes}\ndevices_per_node = 4\nnetwork = "{network}"\n'
BETWEEN = '[between]\nname = "Ethernet"\ngb_per_s = 2\nefficiency = 0.5\nlatency_us = 50\n'
FAST = GROUP.format(device="h100-80gb", nodes=1, network="infiniband")
SLOW = GROUP.format(device="a100-40gb", nodes=2, network="roce")


def _load(folder: Path, *tables: str) -> Cluster:
    (folder / "ours.toml").write_text("\n".join(['name = "ours"', *tables]))
    return load_cluster(str(folder / "ours.toml"))


def _mixed(folder: Path, *tables: str) -> MixedCluster:
    found = _load(folder, *tables)
    assert isinstance(found, MixedCluster)
    return found


def test_devices_are_numbered_through_the_groups(tmp_path: Path) -> None:
    """Nodes and devices count on from group to group, and each has the device and links of its own group."""
    cluster = _mixed(tmp_path, FAST, SLOW, BETWEEN)
    assert (cluster.nodes, cluster.devices, cluster.devices_per_node) == (3, 12, 4)
    assert [cluster.devices_of_node(n) for n in range(3)] == [range(4), range(4, 8), range(8, 12)]
    assert [cluster.part_of_node(cluster.node_of_device(d)).device.name for d in (3, 4)] == ["h100-80gb", "a100-40gb"]
    assert [cluster.kind_of_node(n) for n in range(3)] == [0, 1, 1]


def test_links_between_nodes(tmp_path: Path) -> None:
    """Nodes of one network are joined by its link, the slower where theirs differ, nodes of two by the one between."""
    apart = _mixed(tmp_path, FAST, SLOW, BETWEEN)
    assert apart.link(0, 1).bytes_per_s == 1e9
    assert apart.link(0, 1).latency_s == pytest.approx(50e-6)
    assert apart.link(1, 2) == apart.parts[1].inter
    same = _mixed(tmp_path, FAST, SLOW.replace("roce", "infiniband"))
    assert same.link(0, 1).bytes_per_s == min(part.inter.bytes_per_s for part in same.parts)


def test_a_node_is_as_fast_as_its_slowest_device(tmp_path: Path) -> None:
    """With a speed for each device, neighbouring nodes whose slowest are equally fast are one part."""
    speeds = "speed = [1, 1, 1, 0.9, 1, 0.9, 1, 1, 1, 1, 1, 1]\n"
    cluster = _mixed(tmp_path, GROUP.format(device="a100-80gb", nodes=3, network="x") + speeds)
    assert [(part.nodes, part.device.speed, part.first_device) for part in cluster.parts] == [(2, 0.9, 0), (1, 1.0, 8)]


def test_equal_nodes_after_all(tmp_path: Path) -> None:
    """A file with one group of equal nodes is an ordinary cluster: it plans as one."""
    found = _load(tmp_path, SLOW)
    assert not isinstance(found, MixedCluster)
    assert (found.name, found.nodes, found.devices) == ("ours", 2, 8)


def test_figures_are_those_of_the_devices_meant(tmp_path: Path) -> None:
    """Power and peak are means over the devices named; together they are what all of them have."""
    cluster = _mixed(tmp_path, FAST, SLOW, BETWEEN)
    fast, slow = (part.device.peak_flops_per_s["bfloat16"] for part in cluster.parts)
    assert cluster.device.peak_flops_per_s["bfloat16"] == pytest.approx((4 * fast + 8 * slow) / 12)
    assert device_of(cluster, [0, 1, 4]).peak_flops_per_s["bfloat16"] == pytest.approx((2 * fast + slow) / 3)
    assert device_of(cluster, range(4, 12)) == cluster.parts[1].device
    assert cluster.device.name == "h100-80gb + a100-40gb"


def test_wires(tmp_path: Path) -> None:
    """Tables give the link of each pair of nodes, microseconds and GB/s, the slower direction of both."""
    (tmp_path / "us.csv").write_text("0,5,9\n5,0,7\n8,7,0\n")
    (tmp_path / "gb.csv").write_text("0,10,1\n10,0,2\n3,2,0\n")
    cluster = _mixed(tmp_path, FAST, SLOW, '[wires]\nlatency_us = "us.csv"\ngb_per_s = "gb.csv"\n')
    assert cluster.link(0, 2).bytes_per_s == cluster.link(2, 0).bytes_per_s == 1e9
    assert cluster.link(0, 2).latency_s == pytest.approx(9e-6)
    assert cluster.inter.bytes_per_s == 1e9


def test_what_if_changes_every_part(tmp_path: Path) -> None:
    """A slower network is slower inside groups and between them; less memory is less in each."""
    cluster = _mixed(tmp_path, FAST, SLOW, BETWEEN)
    changed = what_if(cluster, "network=0.5,memory=0.9")
    assert isinstance(changed, MixedCluster)
    assert changed.link(0, 1).bytes_per_s == 0.5e9
    for before, after in zip(cluster.parts, changed.parts, strict=True):
        assert after.inter.bytes_per_s == before.inter.bytes_per_s / 2
        assert after.device.usable_bytes == int(before.device.usable_bytes * 0.9)


WIRES = '[wires]\nlatency_us = "{}"\ngb_per_s = "good.csv"\n'


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ((FAST, SLOW), r"networks infiniband, roce aren't joined; add a table \[between\]"),
        ((FAST, SLOW.replace("nodes = 2", "nodes = 0"), BETWEEN), r"group\.1\.nodes: 0 is not allowed"),
        ((FAST.replace("h100", "h1000"), BETWEEN), r"group\.0\.device: .*'h1000-80gb' is not known"),
        ((FAST + "speed = [1, 1]\n",), r"speed has 2 numbers; give one, or one for each of 4 devices"),
        ((FAST + "speed = -1\n",), r"group\.0\.speed.*-1 is not allowed"),
        ((FAST, SLOW, WIRES.format("none.csv")), r"wires\.latency_us: 'none.csv' is not allowed; can't be read"),
        ((FAST, SLOW, WIRES.format("words.csv")), r"give lines of numbers separated by commas"),
        ((FAST, SLOW, WIRES.format("ragged.csv")), r"2 lines, one with 3 numbers"),
        ((FAST, SLOW, WIRES.format("zero.csv")), r"0.0 stands between two nodes; give a positive number"),
        ((FAST, SLOW, WIRES.format("small.csv")), r"wires have \[2, 3\] lines; give one for each of 3 nodes"),
        ((FAST, FAST.replace("h100-80gb", "xeon-8480")), r"backends cpu, cuda can't train together"),
    ],
)
def test_mistakes(tables: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """Each mistake is named with its place, its value and what is allowed."""
    for name, text in {
        "good": "0,1,1\n1,0,1\n1,1,0\n", "small": "0,1\n1,0\n", "zero": "0,1,0\n1,0,1\n0,1,0\n",
        "ragged": "0,1\n1,0,1\n", "words": "a,b\n",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        _load(tmp_path, *tables)
