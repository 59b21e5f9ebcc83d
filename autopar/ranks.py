"""The ranks of this torchrun job: their devices, and what they do together before training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.accelerator import runtime
from autopar.cluster import Cluster, MixedCluster, load_cluster, same_device
from autopar.cost.measured import MeasuredPricer
from autopar.cost.mixed import MixedPricer, PacedPricer
from autopar.cost.pricer import Pricer
from autopar.cost.roofline import RooflinePricer
from autopar.errors import ConfigError, ProfileError
from autopar.measure.local import local_cluster
from autopar.measure.profile import Profile
from autopar.measure.session import lead, measuring, serve

LOCAL = "local"
Result = TypeVar("Result")


def local_device() -> torch.device:
    """The device of this rank: the cuda device of its local rank where there is one, else the cpu."""
    if runtime().is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % runtime().device_count())
    return torch.device("cpu")


def device_named(device: str | torch.device | None) -> torch.device:
    """The device asked for, by default this rank's; raises ConfigError where the machine has none of its kind."""
    found = local_device() if device is None else torch.device(device)
    if found.type == "cuda" and not runtime().is_available():
        raise ConfigError(f"device {str(found)!r}: this machine has no cuda device that torch can use; give cpu")
    return found


def join_job(backend: str | None = None) -> int:
    """Number of ranks; under torchrun the default process group is made if the script has not done so.

    `backend` is that of torch.distributed: by default nccl where ranks have cuda devices, else gloo.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = local_device()
        if device.type == "cuda":
            runtime().set_device(device)
        rank, world_size = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, rank=rank, world_size=world_size)
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def pricing(cluster: Cluster, profile: str | Path | Profile | None) -> Iterator[Pricer]:
    """Prices on `cluster`: by timings where there are some (this machine's own, or a profile), else by datasheet."""
    roofline = RooflinePricer(cluster)
    timed = Profile.load(profile) if isinstance(profile, str | Path) else profile
    if isinstance(cluster, MixedCluster):
        yield _mixed(cluster, timed)
    elif timed is not None:
        yield MeasuredPricer(timed, roofline)
    elif cluster.name == LOCAL:
        with measuring(local_device()) as session:
            yield MeasuredPricer.on_this_machine(roofline, session)
    else:
        yield roofline


def _mixed(cluster: MixedCluster, profile: Profile | None) -> MixedPricer:
    """Prices on a mixed cluster, whose parts of the profile's device are priced by its timings."""
    names = {part.device.name for part in cluster.parts}
    if profile is None or not any(same_device(profile.environment.device, name) for name in names):
        if profile is not None:
            raise ProfileError(
                f"the profile is of {profile.environment.device!r}, {cluster.name} has {', '.join(sorted(names))}: "
                "give one taken on one of these, or none."
            )
        return MixedPricer(cluster, RooflinePricer)

    def alone(site: Cluster) -> Pricer:
        if not same_device(profile.environment.device, site.device.name):
            return RooflinePricer(site)
        usual = replace(site, device=replace(site.device, speed=1.0))
        timed = MeasuredPricer(profile, RooflinePricer(usual))
        return timed if usual == site else PacedPricer(timed, site)

    return MixedPricer(cluster, alone)


def find_cluster(cluster: Cluster | str | Path) -> Cluster:
    """A cluster by name or file; `local` is this machine with the ranks of the job."""
    if isinstance(cluster, Cluster):
        return cluster
    if str(cluster) == LOCAL:
        return local_cluster(local_device(), join_job())
    return load_cluster(str(cluster))


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Do `work` on rank 0, give every rank its result; the others time operators meanwhile if rank 0 asks.

    Collective over the job. Whatever rank 0 raises is raised on all. Outside a job the process just does it.
    """
    if join_job() == 1:
        return work()
    result: Result = lead(work, local_device()) if dist.get_rank() == 0 else serve(local_device())
    return result
