"""What an answer rests on that its point doesn't name: the version of autopar, and what devices and links take."""

from __future__ import annotations

from autopar.errors import AutoparError


def basis(cluster: str, profile: str | None) -> dict[str, str]:
    """`autopar_version` and the hash `prices`, which changes with files of devices, clusters, fits and the profile.

    `prices` is empty where there are none, as a profile is of other devices.
    """
    from autopar import __version__
    from autopar.cluster import load_cluster
    from autopar.pricing import pricing

    try:
        with pricing(load_cluster(cluster), profile) as pricer:
            prices = pricer.identity()
    except AutoparError:
        prices = ""
    return {"autopar_version": __version__, "prices": prices}
