"""Prices from timings: exactly where a key was timed, else on the curve of its kind, else by the fallback."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.cluster import Cluster, same_device
from autopar.cost.passes import tensor_arguments
from autopar.cost.pricer import CollectiveTimes, OpTimes, Pricer, Seconds, Source
from autopar.cost.sampling import Kind, collectives_to_time, group_of, grouped, kind_of, ops_to_time
from autopar.errors import ProfileError
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.fit import Curve
from autopar.measure.hiding import hidden_share
from autopar.measure.keys import Key
from autopar.measure.lots import in_lots
from autopar.measure.profile import Environment, Profile, Timing
from autopar.measure.store import Store

if TYPE_CHECKING:
    from autopar.measure.session import Session

Points = dict[Kind, list[tuple[float, float]]]


class MeasuredPricer:
    """Prices by the timings in `profile`; with a `session` it times what is missing and keeps that in `store`.

    A key priced once keeps its price for as long as the pricer lives, so that sums taken at different times agree.
    Timings of another device than the cluster's stand for it as they are; then they count as extrapolated.
    Raises ProfileError where the timings are of another backend than the cluster's devices.
    """

    def __init__(
        self, profile: Profile, fallback: Pricer, session: Session | None = None, store: Store | None = None
    ) -> None:
        self._fallback, self._session, self._store = fallback, session, store
        self._environment = profile.environment
        require_backend(profile.environment, fallback.cluster)
        self._elsewhere = not same_device(profile.environment.device, fallback.cluster.device.name)
        self._exact: Source = "extrapolated" if self._elsewhere else "measured"
        self._between: Source = "extrapolated" if self._elsewhere else "fitted"
        self._timed_ops: dict[OpKey, Timing] = {}
        self._timed_collectives: dict[CollectiveKey, Timing] = {}
        self._cluster = _overlapping(fallback.cluster, profile.timings)
        self._op_prices: dict[OpKey, tuple[float, float, Source]] = {}
        self._collective_prices: dict[CollectiveKey, tuple[float, Source]] = {}
        self._absorb(profile.timings.items())

    @classmethod
    def on_this_machine(cls, fallback: Pricer, session: Session, store: Store | None = None) -> MeasuredPricer:
        """A pricer that starts from what the store (by default that of this machine) knows of the environment."""
        store = store or Store()
        return cls(store.profile(session.environment), fallback, session, store)

    @property
    def cluster(self) -> Cluster:
        """The cluster whose seconds these are; how far compute hides communication is as timed, where it was."""
        return self._cluster

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Names the device timed where it isn't the cluster's."""
        if not self._elsewhere:
            return self._fallback.assumptions
        timed, meant = self._environment.device, self.cluster.device.name
        note = f"the profile's times are of {timed!r}, the cluster's devices are {meant!r}: taken as if they were equal"
        return (*self._fallback.assumptions, note)

    def identity(self) -> str:
        """Hash of the timings so far, and of what stands in where there are none."""
        rows = sorted(f"{key!r} {timing!r}" for key, timing in self.profile.timings.items())
        text = "\n".join([self._fallback.identity(), repr(self._environment), *rows])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def profile(self) -> Profile:
        """All timings so far."""
        timings: dict[Key, Timing] = dict(self._timed_ops.items())
        return Profile(self._environment, timings | dict(self._timed_collectives.items()))

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op; first times what is worth it, if there is a session."""
        new = list(dict.fromkeys(key for key in keys if key not in self._op_prices))
        if new:
            self._price_ops(new)
        prices = [self._op_prices[key] for key in keys]
        return OpTimes(_column(prices, 0), _column(prices, 1), [price[2] for price in prices])

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective; first times a ladder of sizes of each kind of group, if there is a session."""
        new = list(dict.fromkeys(key for key in keys if key not in self._collective_prices))
        if new:
            self._price_collectives(new)
        prices = [self._collective_prices[key] for key in keys]
        return CollectiveTimes(_column(prices, 0), [price[1] for price in prices])

    def _price_ops(self, keys: list[OpKey]) -> None:
        predicted = self._fallback.ops(keys)
        if self._session is not None:
            chosen = ops_to_time(keys, predicted.forward_s.tolist(), self._timed_ops)
            for timings in in_lots(self._session.ops, chosen, "timing operators"):
                self._keep(timings.items())
        forward_points, backward_points = self._op_points({kind_of(key) for key in keys})
        kinds = grouped(keys, kind_of)
        forward, sources = _along_curves(predicted.forward_s, kinds, forward_points, predicted.sources, self._between)
        backward, _ = _along_curves(predicted.backward_s, kinds, backward_points, predicted.sources, self._between)
        for key, *price in zip(keys, forward.tolist(), backward.tolist(), sources, strict=True):
            timing = self._timed_ops.get(key)
            if timing is not None and not timing.failed:
                price = [timing.forward_s, timing.backward_s, self._exact]
            elif not any(o.requires_grad for o in tensor_arguments(key)):
                price[1] = 0.0
            self._op_prices[key] = (price[0], price[1], price[2])

    def _op_points(self, kinds: set[Kind]) -> tuple[Points, Points]:
        """Points (predicted, measured seconds) of both passes of the timed ops of some kinds."""
        timed = [(k, t) for k, t in self._timed_ops.items() if not t.failed and kind_of(k) in kinds]
        predicted = self._fallback.ops([key for key, _ in timed])
        forward: Points = {}
        backward: Points = {}
        for (key, timing), forward_s, backward_s in zip(timed, predicted.forward_s, predicted.backward_s, strict=True):
            forward.setdefault(kind_of(key), []).append((float(forward_s), timing.forward_s))
            if timing.backward_s > 0:
                backward.setdefault(kind_of(key), []).append((float(backward_s), timing.backward_s))
        return forward, backward

    def _price_collectives(self, keys: list[CollectiveKey]) -> None:
        if self._session is not None:
            chosen = collectives_to_time(keys, self._timed_collectives)
            for timings in in_lots(self._session.collectives, chosen, "timing collectives"):
                self._keep(timings.items())
        predicted = self._fallback.collectives(keys)
        points: Points = {}
        for key, timing in self._timed_collectives.items():
            if not timing.failed:
                points.setdefault(group_of(key), []).append((float(key.bytes), timing.forward_s))
        sizes = np.array([float(key.bytes) for key in keys])
        fitted, sources = _along_curves(sizes, grouped(keys, group_of), points, predicted.sources, self._between)
        for i, key in enumerate(keys):
            on_curve = group_of(key) in points and key.bytes > 0
            seconds = float(fitted[i] if on_curve else predicted.seconds[i])
            exact = self._timed_collectives.get(key)
            measured = exact is not None and not exact.failed
            self._collective_prices[key] = (seconds, self._exact if measured else sources[i])

    def _keep(self, timings: Iterable[tuple[Key, Timing]]) -> None:
        timings = list(timings)
        self._absorb(timings)
        if self._store is not None and timings:
            self._store.add(self._environment, dict(timings))

    def _absorb(self, timings: Iterable[tuple[Key, Timing]]) -> None:
        for key, timing in timings:
            if isinstance(key, OpKey):
                self._timed_ops[key] = timing
            else:
                self._timed_collectives[key] = timing


def _overlapping(cluster: Cluster, timings: Mapping[Key, Timing]) -> Cluster:
    """The cluster, its devices hiding communication as far as was timed."""
    share = hidden_share({key: timing for key, timing in timings.items() if isinstance(key, CollectiveKey)})
    return cluster if share is None else replace(cluster, device=replace(cluster.device, overlap=share))


def require_backend(environment: Environment, cluster: Cluster) -> None:
    """Raise ProfileError unless timings of the environment can stand for the cluster's devices."""
    if environment.backend != cluster.device.backend:
        raise ProfileError(
            f"the profile is of backend {environment.backend!r} ({environment.device}), cluster {cluster.name!r} is of "
            f"{cluster.device.backend!r} ({cluster.device.name}). Give a profile taken on such devices, or none."
        )


def _column(rows: Sequence[Sequence[object]], index: int) -> Seconds:
    return np.array([row[index] for row in rows], dtype=np.float64)


def _along_curves(
    x: Seconds, kinds: Mapping[Kind, list[int]], points: Points, sources: Sequence[Source], between: Source
) -> tuple[Seconds, list[Source]]:
    """Seconds at `x` (shape (keys,)) on the curve of each kind that has points, else `x` itself with its source.

    `between` is the source of what lies between timed points.
    """
    seconds, found = np.array(x), list(sources)
    for kind, members in kinds.items():
        if kind not in points:
            continue
        curve = Curve.through([p for p, _ in points[kind]], [s for _, s in points[kind]])
        seconds[members], inside = curve.at(x[members])
        for i, is_inside in zip(members, inside.tolist(), strict=True):
            found[i] = between if is_inside else "extrapolated"
    return seconds, found
