"""Which cluster is meant, and what things take there. Torch is asked only about the machine that this runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autopar.cluster import Cluster, MixedCluster, load_cluster, same_device
from autopar.cost.measured import MeasuredPricer
from autopar.cost.mixed import MixedPricer, PacedPricer
from autopar.cost.pricer import Pricer
from autopar.cost.roofline import RooflinePricer
from autopar.errors import ProfileError
from autopar.measure.profile import Profile

LOCAL = "local"


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
        from autopar.measure.session import measuring
        from autopar.ranks import local_device

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
        from autopar.measure.local import local_cluster
        from autopar.ranks import join_job, local_device

        return local_cluster(local_device(), join_job())
    return load_cluster(str(cluster))
