"""Timing operators and collectives on this machine: what `autopar profile` and `profile-collectives` do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.asked import Asked, Inputs, traced
from autopar.cluster import Cluster

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autopar.measure.profile import Profile
    from autopar.measure.session import Session


def profile(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    cluster: Cluster | str | Path,
    global_batch: int,
    dtype: str = "bf16",
    device: str | torch.device | None = None,
    loss_fn: Callable[..., Any] | None = None,
    name: str | None = None,
    add_to: str | Path | None = None,
    say: Callable[[str], object] = str,
) -> Profile:
    """Time, on a device of this machine, the operators that planning `model` for `cluster` asks for.

    `device` is cuda where there is one, else cpu. What this machine has timed before is not timed again, and what was
    timed when a run is interrupted is kept; what failed before is tried again. The result is what `plan(profile=...)`
    takes once it is saved, with the timings of the profile file `add_to` where given. `say` is told how much there is
    to time before that begins. Under torchrun the call is collective and all ranks time at once. Raises as `plan` does,
    and ProfileError where the device is of another backend than the cluster's, or `add_to` of another environment.
    """
    from autopar.formulate.profiling import profile_model
    from autopar.measure.store import Store

    asked = Asked(model, cluster, global_batch, dtype, name=name)
    request, where = asked.checked()

    def take(session: Session) -> Profile:
        graph, _ = traced(asked, example_inputs, loss_fn)
        return profile_model(graph, where, request, session, Store(), say)

    return _measured(take, device, add_to)


def profile_collectives(
    *,
    device: str | torch.device | None = None,
    add_to: str | Path | None = None,
    say: Callable[[str], object] = str,
) -> Profile:
    """Time collectives of 4 KiB to 64 MiB, between devices 1 GiB, over all groups of this torchrun job.

    Collective over the job. Resumes, adds to a file and says what there is to do as `profile` does. One process has no
    groups: the result is then empty.
    """
    from autopar.formulate.profiling import profile_job
    from autopar.measure.local import local_cluster
    from autopar.measure.store import Store
    from autopar.ranks import device_named, join_job

    here = local_cluster(device_named(device), join_job())
    return _measured(lambda session: profile_job(session, Store(), say, here), device, add_to)


def _measured(
    take: Callable[[Session], Profile], device: str | torch.device | None, add_to: str | Path | None
) -> Profile:
    """What `take` times on this rank's device, with all ranks of the job; added to the profile in a file, if any."""
    from autopar.measure.conditions import conditions
    from autopar.measure.profile import Profile
    from autopar.measure.session import measuring
    from autopar.ranks import device_named, on_rank_0

    def work() -> Profile:
        where = device_named(device)
        with measuring(where) as session:
            if add_to is None:
                return replace(take(session), conditions=conditions(where))
            before = Profile.load(add_to)
            session.environment.require_same(before.environment, str(add_to))
            found = before.merged(take(session), str(add_to))
            return replace(found, conditions=conditions(where))

    return on_rank_0(work)
