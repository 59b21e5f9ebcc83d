"""Points dealt to the processes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from autopar.errors import ConfigError
from autopar.jobs.points import Point
from autopar.jobs.team import TRIES, Solve, lost
from autopar.jobs.work import Result


def solved_by_ray(points: Sequence[Point], solve: Solve, workers: int) -> Iterator[Result]:
    """Results as they are found by the cluster of RAY_ADDRESS, or by a local one of so many processes.

    Files that points name must be there on all machines. A point whose process dies is tried again once. Raises
    ConfigError where Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("--ray needs Ray: pip install 'autopar[ray]'") from None
    mine = not ray.is_initialized()
    if mine:
        elsewhere = bool(os.environ.get("RAY_ADDRESS"))
        ray.init(num_cpus=None if elsewhere else workers, include_dashboard=False, log_to_driver=False)
    try:
        task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(solve)
        points_of = {task.remote(point): point for point in points}
        while points_of:
            (done, *_), _ = ray.wait(list(points_of))
            point = points_of.pop(done)
            try:
                yield ray.get(done)
            except ray.exceptions.RayError as error:
                yield lost(point, f"Ray gave it up ({type(error).__name__})")
    finally:
        if mine:
            ray.shutdown()
