"""The branches for devices, run with a stand-in where there is none; operands are meta tensors, groups are fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autopar.accelerator import runtime, standing_in
from autopar.cluster import find_device, same_device
from autopar.emit.peak import measured_peak_tensor_bytes
from autopar.errors import ConfigError
from autopar.graph import OpKey
from autopar.measure import ops
from autopar.measure.local import LOOPBACK, NOMINAL_CUDA, local_cluster
from autopar.measure.ops import clock_for, time_op
from autopar.measure.session import measuring
from autopar.ranks import device_named, join_job, local_device
from tests.measure.test_ops import RUNNABLE
from tests.standin import HostEvent, StandIn

META = torch.device("meta")
DRIVER_NAMES = {
    "NVIDIA A10": "a10-24gb", "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie", "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA A10G": "a10g-24gb",
    "NVIDIA A40": "a40-48gb", "NVIDIA A800-SXM4-80GB": "a800-80gb", "NVIDIA B200": "b200-180gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA H100 PCIe": "h100-80gb-pcie", "NVIDIA H20": "h20-96gb",
    "NVIDIA H200": "h200-141gb", "NVIDIA H800": "h800-80gb", "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA GeForce RTX 3090": "rtx3090-24gb", "NVIDIA GeForce RTX 4090": "rtx4090-24gb",
    "NVIDIA GeForce RTX 5090": "rtx5090-32gb", "NVIDIA L4": "l4-24gb", "NVIDIA L40S": "l40s-48gb",
    "NVIDIA RTX A5000": "rtx-a5000-24gb", "Tesla P4": "p4-8gb", "Tesla P100-PCIE-16GB": "p100-16gb-pcie",
    "Tesla T4": "t4-16gb", "Tesla V100-SXM2-16GB": "v100-16gb", "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-PCIE-32GB": "v100-32gb-pcie", "AMD Instinct MI300X": "mi300x-192gb",
}  # fmt: skip
"""What drivers call devices, by what their files are called."""


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """Four devices that aren't there."""
    device = StandIn()
    with standing_in(device):
        yield device


@pytest.mark.parametrize(("driver", "file"), DRIVER_NAMES.items())
def test_the_drivers_name_finds_the_file(driver: str, file: str) -> None:
    """This machine's device has the rates and links of its file, the memory that torch reports and its own name."""
    with standing_in(StandIn(driver, memory_bytes=7_000_000_000)):
        cluster = local_cluster(torch.device("cuda", 0), 4)
    known = find_device(file)
    assert cluster.device.peak_flops_per_s == known.device().peak_flops_per_s
    assert (cluster.intra, cluster.inter) == (known.intra.link(), known.inter.link())
    assert (cluster.device.name, cluster.device.memory_bytes) == (driver, 7_000_000_000)
    assert cluster.device.usable_bytes <= 7_000_000_000
    assert same_device(driver, file)


def test_an_unknown_device_has_nominal_rates(stand_in: StandIn) -> None:
    """A device that no file knows is planned for all the same."""
    stand_in.name = "Chip 9000"
    cluster = local_cluster(torch.device("cuda", 0), 2)
    assert (cluster.device.name, cluster.device.backend, cluster.devices) == ("Chip 9000", "cuda", 2)
    assert cluster.device.peak_flops_per_s == NOMINAL_CUDA.peak_flops_per_s
    assert 0 < cluster.device.usable_bytes < stand_in.memory_bytes
    assert cluster.intra != LOOPBACK


@pytest.mark.usefixtures("stand_in")
def test_each_rank_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a node take its devices in turn; cuda may be asked for by name."""
    for local_rank, index in ((0, 0), (3, 3), (5, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert local_device() == torch.device("cuda", index)
    assert device_named("cuda") == torch.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_without_a_device() -> None:
    """Without a device ranks compute on the cpu, and asking for cuda is refused."""
    assert runtime() is torch.cuda
    assert local_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match="no cuda device"):
        device_named("cuda")


def test_joining_a_job_of_devices(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a rank makes its device the current one and joins the group of the job, once."""
    for key, value in {"RANK": "0", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    try:
        assert join_job("fake") == 4
        assert stand_in.current == torch.device("cuda", 2)
        assert join_job("fake") == 4
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("key", RUNNABLE, ids=lambda k: k.target)
def test_ops_are_timed_by_events(stand_in: StandIn, key: OpKey) -> None:
    """Off the host seconds come from pairs of events on the device's stream, of both passes."""
    timing = time_op(key, META, budget_s=0.002)
    assert timing.failed == ""
    assert len(timing.forward.raw_s) == len(timing.backward.raw_s) >= 3
    assert timing.forward_s > 0
    marks = stand_in.streams["meta"]
    assert len(marks) % 2 == 0
    assert len(marks) >= 4 * len(timing.forward.raw_s)


def test_clocks_are_warmed_up_once_a_session(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first timing the device computes for the time it takes, before later ones of the session not."""
    monkeypatch.setattr(ops, "WARMING_S", 0.01)
    marks = []
    for _ in range(2):
        ops.release_buffers()
        for _ in range(2):
            before = len(stand_in.streams.get("meta", []))
            ops._warm_clocks(META)
            marks.append(len(stand_in.streams["meta"]) - before)
    assert [count > 0 for count in marks] == [True, False, True, False]


def test_seconds_between_events(stand_in: StandIn) -> None:
    """Events tell milliseconds, the clock gives seconds."""
    stop = clock_for(META)
    seconds = stop()
    first, last = stand_in.streams["meta"]
    assert seconds == pytest.approx(last.at_s - first.at_s)
    assert isinstance(first, HostEvent)


def test_the_environment_names_the_device(stand_in: StandIn) -> None:
    """Timings are kept under the driver's name of the device."""
    with measuring(torch.device("cuda", 1)) as session:
        assert (session.environment.device, session.environment.backend) == (stand_in.name, "cuda")


def test_peak_is_the_allocators(stand_in: StandIn) -> None:
    """Off the host the peak is what the allocator says since the reset."""
    stand_in.allocate(100)
    stand_in.allocate(-60)

    def work() -> None:
        stand_in.allocate(30)
        stand_in.allocate(-30)

    assert measured_peak_tensor_bytes(work, META) == 70
