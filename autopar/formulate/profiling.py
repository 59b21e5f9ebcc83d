"""Timing what planning would ask for, and the collectives of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autopar.cluster import Cluster
from autopar.cost.measured import require_backend
from autopar.cost.pricer import Pricer
from autopar.cost.recorder import Recorder
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.planner import Planner
from autopar.graph import CollectiveKey, OpGraph, OpKey
from autopar.measure.collectives import fits_job
from autopar.measure.hiding import COVERED, HIDDEN, overlap_keys
from autopar.measure.keys import Key
from autopar.measure.lots import expected_s, in_lots
from autopar.measure.profile import Profile, Timing
from autopar.measure.session import Session
from autopar.measure.store import Store
from autopar.plan import Request

Say = Callable[[str], object]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES_BYTES = {"cpu": tuple(4096 * 4**i for i in range(8)), "cuda": tuple(4096 * 4**i for i in range(10))}
"""By backend: 4 KiB to 64 MiB between processes of hosts, to 1 GiB between devices."""


def profile_model(
    graph: OpGraph, cluster: Cluster, request: Request, session: Session, store: Store, say: Say
) -> Profile:
    """Timings of the operators (and in a job collectives) that planning `graph` asks for; new ones go to the store.

    What is timed is what the search asks for when it plans by the datasheet. Raises as the search does, and
    ProfileError where the session's device is of another backend than the cluster's.
    """
    environment = session.environment
    require_backend(environment, cluster)
    recorder = Recorder(RooflinePricer(cluster))
    Planner(graph, cluster, recorder, request).plan()
    known = _succeeded(store.profile(environment).timings)
    ops, collectives = recorder.worth_timing()
    fitting = [key for key in collectives if key not in known and fits_job(key, environment.busy_ranks)]
    _time([key for key in ops if key not in known], fitting, session, store, say, recorder)
    return Profile(environment, recorder.relevant(store.profile(environment).timings))


def profile_job(
    session: Session, store: Store, say: Say, cluster: Cluster, sizes_bytes: Sequence[int] | None = None
) -> Profile:
    """Timings of collectives of every kind and size over all groups that the ranks of the job can be dealt into, and of
    how far compute and communication slow each other down.

    `cluster` is this machine, for saying how long it will take.
    """
    environment = session.environment
    wanted = job_collectives(environment.busy_ranks, sizes_bytes or SIZES_BYTES[environment.backend])
    known = _succeeded(store.profile(environment).timings)
    wanted += overlap_keys(environment.busy_ranks)
    missing = [key for key in wanted if key not in known]
    _time([], missing, session, store, say, RooflinePricer(cluster))
    found = store.profile(environment).timings
    return Profile(environment, {key: found[key] for key in wanted if key in found})


def job_collectives(ranks: int, sizes_bytes: Sequence[int]) -> list[CollectiveKey]:
    """Every kind and size, over groups of every number of ranks and stride that divides the job."""
    groups = [(n, stride) for n, stride in product(range(2, ranks + 1), range(1, ranks)) if ranks % (n * stride) == 0]
    return [CollectiveKey(kind, size, *group) for group in groups for kind, size in product(KINDS, sizes_bytes)]


def _time(
    ops: Sequence[OpKey],
    collectives: Sequence[CollectiveKey],
    session: Session,
    store: Store,
    say: Say,
    predicted: Pricer,
) -> None:
    """Time and store what is missing, having said how much that is."""
    times = predicted.ops(ops)
    seconds = [*(times.forward_s + times.backward_s).tolist(), *_predicted_s(collectives, predicted)]
    say(f"{len(ops)} operators and {len(collectives)} collectives to time, about {expected_s(seconds):.0f} s")
    for timings in in_lots(session.ops, ops, "timing operators"):
        store.add(session.environment, dict(timings.items()))
    for sent in in_lots(session.collectives, collectives, "timing collectives"):
        store.add(session.environment, dict(sent.items()))


def _succeeded(timings: Mapping[Key, Timing]) -> set[Key]:
    """What need not be timed again. What failed is tried anew: memory may be free by now, an operator registered."""
    return {key for key, timing in timings.items() if not timing.failed}


def _predicted_s(keys: Sequence[CollectiveKey], pricer: Pricer) -> Iterator[float]:
    """Seconds by the datasheet; what is timed beside compute is an all-reduce for that."""
    plain = [replace(key, kind="all_reduce") if key.kind in (HIDDEN, COVERED) else key for key in keys]
    yield from pricer.collectives(plain).seconds.tolist()
