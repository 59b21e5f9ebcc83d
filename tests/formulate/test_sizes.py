"""How many devices a plan uses, by what is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Link, load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.config import ManualConfig
from autopar.formulate.planner import Planner
from autopar.formulate.sizes import NEAR, PER_DEVICE
from autopar.plan import PlanRecord
from tests.formulate.cases import planner

CONFIGS = ("dp=2", "tp=2", "dp=2,zero=3,recompute=full", "dp=2,zero=3,microbatch_size=4", "pp=2,microbatch_size=1")


def two_nodes(objective: str = "step_time", *constraints: str, price: float | None = None) -> Planner:
    """Two nodes of two devices with hardly a network between them."""
    made = planner("mlp", "2x2xa100-80gb", constraints=constraints)
    device = replace(made.cluster.device, price_per_hour=price)
    cluster = replace(made.cluster, device=device, inter=Link("string", 1e6, 1e-3))
    request = replace(made.request, objective=objective)
    return replace(made, cluster=cluster, pricer=RooflinePricer(cluster), request=request)


def on(devices: int) -> PlanRecord:
    """The fastest plan on so many of the devices."""
    return two_nodes("step_time", f"devices={devices}").plan()


def test_one_node_where_the_network_is_slow() -> None:
    """The fastest plan of two nodes joined by a string is that of one node, and says what all devices would take."""
    found, all_four = two_nodes().plan(), on(4)
    assert found.step_time_s == pytest.approx(min(on(2).step_time_s, all_four.step_time_s))
    assert (found.placement, found.request.devices) == ((0, 1), 4)
    assert f"all of them takes {all_four.step_time_s:.4g} s" in found.assumptions[-1]
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= found.step_time_s


@pytest.mark.parametrize(
    "objective", ["cost_per_token", *(pytest.param(o, marks=pytest.mark.slow) for o in PER_DEVICE if o[0] != "c")]
)
def test_device_seconds(objective: str) -> None:
    """Price, energy and rate a device are best where devices times seconds are fewest of all numbers of devices."""
    found = two_nodes(objective, price=2.0).plan()
    best = min(devices * on(devices).step_time_s for devices in (1, 2, 4))
    used = len(found.placement)
    assert used * found.step_time_s == pytest.approx(best)
    assert found.step_price == pytest.approx(2.0 / 3600 * best)
    assert found.energy_j == pytest.approx(400 * best)
    assert found.gap is not None
    assert found.gap >= 0


@pytest.mark.slow
def test_least_memory() -> None:
    """No plan written by hand holds less than the one that is to hold the least, but for what it may miss."""
    made = planner("mlp")
    found = replace(made, request=replace(made.request, objective="memory")).plan()
    least = min(made.estimate(ManualConfig.parse(text)).peak_tensor_bytes for text in CONFIGS)
    assert found.peak_tensor_bytes <= NEAR * least
    assert found.peak_tensor_bytes < made.plan().peak_tensor_bytes


def test_prices_of_cluster_files(tmp_path: Path) -> None:
    """A cluster file has its own price and power of a device."""
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "m"\ndevice = "a100"\nnodes = 1\ndevices_per_node = 2\nprice_per_hour = 1.5\npower_w = 300\n'
    )
    device = load_cluster(str(file)).device
    assert (device.price_per_hour, device.power_w) == (1.5, 300)
