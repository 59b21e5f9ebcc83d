"""Device and cluster files, names and the mistakes people make in them."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import (
    ClusterFile,
    DeviceFile,
    Fabric,
    Link,
    add_device,
    all_devices,
    device_from_figures,
    find_device,
    load_cluster,
    shipped_clusters,
)
from autopar.errors import ConfigError
from autopar.settings import check_settings

GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user folder of the test's own."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "user"))
    return tmp_path / "user"


@pytest.mark.parametrize("device", all_devices(), ids=lambda d: d.name)
def test_shipped_device_is_plausible(device: DeviceFile) -> None:
    """Memory fits, every rate has an efficiency, and every figure that is a measurement or claim names its source."""
    assert device.reserve_gib < device.usable_gib <= device.memory_gib
    assert set(device.peak_tflops) | {"memory"} == set(device.efficiency)
    assert {"peak_tflops", "memory_gb_per_s", "efficiency", "usable_gib", "links"} <= set(device.sources)


def test_shipped_names_are_unambiguous() -> None:
    """No name or alias stands for two devices."""
    owners: dict[str, set[str]] = {}
    for device in all_devices():
        for name in (device.name, *device.aliases):
            owners.setdefault(re.sub(r"[^a-z0-9.]+", "-", name.lower()), set()).add(device.name)
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "gpu_specs.json"
"""Rates of devices from another source, where somebody has put them beside the checkout."""

RATES = {"bf16": ("bfloat16", "float16"), "fp8": ("float8_e4m3fn",), "fp32": ("float32",)}


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"no {PUBLISHED.name} beside the checkout")
def test_figures_agree_with_another_source() -> None:
    """Each device that another source lists is known by its name there, and no rate differs by more than 15 %."""
    apart = []
    for name, figures in json.loads(PUBLISHED.read_text()).items():
        device = find_device(name)
        ours = {"bw": device.memory_gb_per_s}
        for key, dtypes in RATES.items():
            known = [device.peak_tflops[d] for d in dtypes if d in device.peak_tflops]
            ours[key] = known[0] if known else figures.get(key, 0)
        apart += [
            (name, key, ours[key], figures[key])
            for key in ours.keys() & figures.keys()
            if figures[key] and not 0.85 < ours[key] / figures[key] < 1.15
        ]
    assert apart == []


def test_the_devices_people_have_are_shipped() -> None:
    """Data centre, workstation, consumer and processor devices of the last ten years resolve by their usual names."""
    names = (
        "a100 a100-40gb a100-80gb a100-40gb-pcie a100-80gb-pcie h100-sxm h100-pcie h200 h20 a800 h800 b200 b300 gb200 "
        "gb300 gh200 v100-16gb v100-32gb t4 l4 l40s a10 a40 rtx3090 rtx4090 rtx5090 rtx-pro-6000 mi100 mi210 "
        "mi250x-gcd mi300x mi325x mi355x p4 p100 a5000 arc-pro-b60 epyc-9654 xeon-8480"
    )
    for name in names.split():
        assert find_device(name).name
    assert sum(device.backend == "cpu" for device in all_devices()) >= 2


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [
        ("8xa100-80gb", 1, 8, "a100-80gb"),
        ("16x8xh100-80gb", 16, 8, "h100-80gb"),
        ("1xV100_SXM", 1, 1, "v100-32gb"),
        ("selene", 384, 8, "a100-80gb"),
    ],
)
def test_named_clusters(text: str, nodes: int, per_node: int, device: str) -> None:
    """Sizes are read from the name; aliases are found whatever their case and punctuation."""
    cluster = load_cluster(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (nodes, per_node, device)
    assert cluster.devices == nodes * per_node


def test_units() -> None:
    """File figures become base units: 2039 GB/s, 312 TFLOP/s, 79.1 GiB; a link is its rate times the share reached."""
    cluster = load_cluster("2x8xa100-80gb")
    assert cluster.device.memory_bytes_per_s == 2039e9
    assert cluster.device.peak_flops_per_s["bfloat16"] == 312e12
    assert cluster.device.usable_bytes == int(79.1 * GIB)
    assert cluster.inter.bytes_per_s == pytest.approx(25e9 * 0.85)


def test_shipped_clusters_load() -> None:
    """Every shipped cluster file names a device there is."""
    assert [load_cluster(c.name).devices for c in shipped_clusters()] == [
        c.cluster().devices for c in shipped_clusters()
    ]


def test_unknown_device_names_near_ones() -> None:
    """A misspelt device is answered with the nearest names and the command that adds one."""
    with pytest.raises(ConfigError, match=r"'h100-8gb' is not known; did you mean h100-80gb.*autopar devices add"):
        load_cluster("8xh100-8gb")


def test_unknown_cluster_names_near_ones() -> None:
    """A misspelt cluster is answered with the nearest name and the grammar."""
    with pytest.raises(ConfigError, match=r"'selenne' is not known; did you mean selene.*\[NODESx\]DEVICESxDEVICE"):
        load_cluster("selenne")


def test_all_mistakes_of_a_file_at_once(tmp_path: Path) -> None:
    """Wrong, missing and unknown fields of one file are all reported, each with file, field, value and remedy."""
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nnodes = 0\ndevices_per_node = "8"\nnode = 3\n[inter]\ngb_per_s = -1\n')
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    text = "\n".join(caught.value.mistakes)
    assert all(m.startswith(f"{path}: ") for m in caught.value.mistakes)
    assert "nodes: 0 is not allowed; greater than or equal to 1." in text
    assert "devices_per_node: '8' is not allowed" in text
    assert "device: is missing" in text
    assert "node: unknown field; did you mean nodes" in text
    assert "inter.gb_per_s: -1 is not allowed; greater than 0." in text


def test_file_that_is_no_toml(tmp_path: Path) -> None:
    """A file that can't be parsed is named with the place of the mistake."""
    path = tmp_path / "mine.toml"
    path.write_text("name = = 3")
    with pytest.raises(ConfigError, match=r"mine.toml: not TOML: .*line 1"):
        load_cluster(str(path))


def test_added_device_is_found(own_folder: Path) -> None:
    """A device written by `add_device` is found by name, with the same figures, and wins over a shipped one."""
    template = find_device("a100-80gb")
    mine = template.model_copy(update={"name": "My Chip", "aliases": ("mc",), "memory_gb_per_s": 1000.0})
    path = add_device(mine)
    assert path.parent == own_folder / "devices"
    assert find_device("my-chip") == mine
    add_device(template.model_copy(update={"power_w": 123.0}))
    assert find_device("A100").power_w == 123.0


@pytest.mark.parametrize("name", ["4090x", "4090", "---", "a\nb"])
def test_names_that_no_cluster_can_have_are_refused(name: str) -> None:
    """A device is only added under a name that `8xNAME` is read back as."""
    with pytest.raises(ConfigError, match="would not be read as 8 of it; give a name that begins with a letter"):
        device_from_figures(name, tflops=1, fp32_tflops=1, bandwidth_gbs=1, memory_gib=1, link_gbs=1, network_gbs=1)


def test_broken_added_file_is_left_out(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One broken file of the user's is named on standard error, once, and everything else is found as before."""
    (own_folder / "devices").mkdir(parents=True)
    (own_folder / "devices" / "broken.toml").write_text("name = = 3")
    assert [load_cluster(name).devices for name in ("8xa100-80gb", "selene")] == [8, 3072]
    err = capsys.readouterr().err
    assert err.startswith("warning: ")
    assert err.count("broken.toml") == 1


@given(st.dictionaries(st.sampled_from([*ClusterFile.model_fields, "x"]), st.integers() | st.text() | st.floats()))
def test_any_cluster_data_is_a_cluster_or_a_mistake(data: dict[str, object]) -> None:
    """Arbitrary values give a cluster or a ConfigError, never another exception."""
    with contextlib.suppress(ConfigError):
        check_settings(data, ClusterFile, "file").cluster()


def test_every_key_of_a_rate_is_a_dtype() -> None:
    """Rates are keyed by dtype names; another key is refused with the list."""
    data = find_device("a100").model_dump() | {"peak_tflops": {"int8": 624.0}}
    with pytest.raises(ConfigError, match="int8 is no dtype; give bfloat16"):
        check_settings(json.loads(json.dumps(data)), DeviceFile, "file")


FABRIC = """
name = "railed"
device = "h100-80gb"
nodes = 64
devices_per_node = 8
[inter]
name = "InfiniBand NDR"
gb_per_s = 50
efficiency = 0.85
latency_us = 8
"""


def test_what_a_file_says_of_its_switches(tmp_path: Path) -> None:
    """Rails, pods and sums in switches reach the link between nodes; what can't be is said with the remedy."""
    path = tmp_path / "railed.toml"
    path.write_text(FABRIC + "in_switch = true\nrails = true\npod_nodes = 32\nspine_share = 0.5\n")
    assert load_cluster(str(path)).inter == Fabric("InfiniBand NDR", 42.5e9, 8e-6, True, True, 32, 0.5)
    path.write_text(FABRIC)
    assert type(load_cluster(str(path)).inter) is Link
    inside = FABRIC.replace("[inter]", "[intra]")
    for text, remedy in ((FABRIC + "spine_share = 0.5\n", "add pod_nodes"), (inside + "rails = true\n", "[inter]")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(remedy)):
            load_cluster(str(path))
