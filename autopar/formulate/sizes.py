"""On how many devices a plan is looked for: on all, or on fewer where that is faster, cheaper or needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod
from time import monotonic

from autopar.cluster import MixedCluster
from autopar.cost.mixed import MixedPricer
from autopar.cost.roofline import flop_rate
from autopar.cost.states import STATE_BYTES
from autopar.cost.work import model_flops
from autopar.engine.search import Outcome
from autopar.formulate.finer import refined
from autopar.formulate.leanest import leanest
from autopar.formulate.searched import Searched, searched
from autopar.formulate.space import Space
from autopar.graph import DTYPE_BYTES

PER_DEVICE = ("tokens_per_s_per_device", "cost_per_token", "energy_per_token")
"""Objectives in which a device that is left idle costs nothing: all are best where device-seconds are fewest."""
PROMISING = 0.6
"""Fewer nodes are looked at where a plan of this share of the highest rate would be faster on them."""
NO_SLOWER = 1e-6
"""What a plan on fewer devices may be slower, as a share, to count as as fast: sums differ by rounding."""
NEAR = 1.02
"""How near the least memory is come to."""
PARTS_TRIED = 3
"""Parts of a mixed cluster that are looked at alone."""
PATIENCE = 2
"""Sizes without a gain after which no larger one is looked at."""


@dataclass(frozen=True)
class Sizes:
    """A search under a limit of bytes a device, for `top` plans, until `end_s` by the monotonic clock."""

    space: Space
    limit_bytes: int
    top: int = 1
    end_s: float = inf

    def searched(self) -> list[Searched]:
        """The sizes looked at, all or the pinned one among them."""
        request, pinned = self.space.request, self.space.pinned_devices
        if isinstance(self.space.pricer, MixedPricer) and request.objective != "memory" and not pinned:
            return list(self._of_parts(self.space.pricer.cluster))
        if request.objective == "memory":
            return [self._least_memory(pinned or request.devices)]
        if pinned:
            return [self._on(pinned)]
        if request.objective in PER_DEVICE:
            return list(self._fewest_device_seconds())
        whole = self._on(request.devices)
        return [whole, *(self._faster(whole) if whole.answer.best else self._possible(whole))]

    def _of_parts(self, cluster: MixedCluster) -> Iterator[Searched]:
        """All devices of a mixed cluster, then its strongest parts alone as far as they do better."""
        whole = self._on(cluster.devices)
        yield whole
        weighs = self.space.request.objective in PER_DEVICE
        best = whole.best_s * (cluster.devices if weighs else 1)
        dtype = self.space.request.policy.compute
        strongest = sorted(cluster.parts, key=lambda part: -part.devices * flop_rate(part.device, dtype))
        for part in strongest[:PARTS_TRIED]:
            space, weight = self.space.on_part(part), part.devices if weighs else 1
            limit = min(self.limit_bytes, part.device.limit_bytes(space.request.memory_limit_bytes))
            alone = Sizes(space, limit, self.top, self.end_s)
            if monotonic() < self.end_s and alone._least_s(part.devices) * weight < best:
                found = alone._on(part.devices, best / weight)
                best = min(best, found.best_s * weight)
                yield found

    # --- which --------------------------------------------------------------------------------------------------------

    def _faster(self, whole: Searched) -> Iterator[Searched]:
        """Fewer nodes, where they may be faster, or as fast.

        Where batch and devices divide one another that is one node alone, which needs no network: fewer devices send
        no less.
        """
        best_s, batch = whole.best_s, self.space.request.global_batch
        even = batch % whole.devices == 0 or whole.devices % batch == 0
        for devices in self._fewer_nodes()[-1:] if even else self._fewer_nodes():
            if self._least_s(devices) < PROMISING * best_s and monotonic() < self.end_s:
                found = self._on(devices, best_s * (1 + NO_SLOWER))
                best_s = min(best_s, found.best_s)
                yield found

    def _possible(self, whole: Searched) -> Iterator[Searched]:
        """The largest smaller size on which there is a plan, where there is none on all devices."""
        if whole.answer.outcome is Outcome.TIME_LIMIT:
            return
        within = range(min(self.space.cluster.devices_per_node, whole.devices) - 1, 0, -1)
        for devices in (*self._fewer_nodes(), *within):
            if self._states_bytes() > devices * self.limit_bytes or monotonic() > self.end_s:
                return
            found = self._on(devices)
            yield found
            if found.answer.best:
                return

    def _fewest_device_seconds(self) -> Iterator[Searched]:
        """From the smallest size that holds the model's states on, until larger ones no longer gain."""
        best, without_gain = inf, 0
        whole = self.space.request.devices
        node = min(self.space.cluster.devices_per_node, whole)
        within = [d for d in range(1, node) if node % d == 0]
        for devices in sorted({whole, *self._fewer_nodes(), *within}):
            last = devices == whole and best == inf
            if not last and (self._states_bytes() > devices * self.limit_bytes or without_gain >= PATIENCE):
                continue
            found = self._on(devices, best / devices)
            yield found
            gained = found.best_s * devices < best
            without_gain = 0 if gained or best == inf else without_gain + 1
            best = min(best, found.best_s * devices)

    def _fewer_nodes(self) -> list[int]:
        """Devices of fewer whole nodes: quarters of all, the next lower power of two, one node; the largest first."""
        cluster, whole = self.space.cluster, self.space.request.devices
        nodes = whole // cluster.devices_per_node
        fewer = {nodes // 4, nodes // 2, 3 * nodes // 4, 1 << max(0, (nodes - 1).bit_length() - 1), 1}
        return [n * cluster.devices_per_node for n in sorted(fewer, reverse=True) if 0 < n < nodes]

    def _least_s(self, devices: int) -> float:
        """Seconds of a step at the highest rate of so many devices."""
        space = self.space
        rate = flop_rate(space.cluster.device, space.request.policy.compute)
        return model_flops(space.graph, space.request.global_batch) / (rate * devices)

    def _states_bytes(self) -> float:
        """Bytes of parameters and optimizer states, which all devices together hold once at least."""
        policy = self.space.request.policy
        states = STATE_BYTES.get(self.space.request.optimizer)
        each = DTYPE_BYTES[policy.parameters] + (2 * DTYPE_BYTES[policy.states] if states is None else states)
        return each * sum(prod(spec.shape_at(1)) for spec in self.space.graph.params.values() if spec.requires_grad)

    # --- one size -----------------------------------------------------------------------------------------------------

    def _on(self, devices: int, below_s: float = inf, limit_bytes: int | None = None) -> Searched:
        scenarios = tuple(self.space.searched(devices, limit_bytes or self.limit_bytes))
        found = Searched(devices, scenarios, searched(scenarios, self.top, self.end_s, below_s))
        return refined(found, self.space, self.top, self.end_s)

    def _least_memory(self, devices: int) -> Searched:
        """The fastest of the plans under a limit that is within `NEAR` of one proven too small, by bisection."""
        scenarios = tuple(self.space.searched(devices, self.limit_bytes))
        for scenario in scenarios:
            scenario.first_bound_s()
        low = min((scenario.least_bytes for scenario in scenarios), default=inf)
        least = leanest(scenarios)[0] if low < inf else inf
        high = int(min(least, self.limit_bytes))
        found = self._on(devices, limit_bytes=high)
        while found.answer.best and high > NEAR * low and monotonic() < self.end_s:
            middle = int((low + high) / 2)
            tried = self._on(devices, limit_bytes=middle)
            if tried.answer.best:
                found, high = tried, middle
            else:
                low = middle
        return found
