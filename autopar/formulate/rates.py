"""Seconds and bytes that one element of a parameter costs, by how it is kept: linear, hence a lower bound.

Collectives and copies of many parameters are done together, so what a parameter adds is taken without latency: the
slope at the size of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.cost.demand import Demand, price_demands
from autopar.cost.memory import held_bytes_per_element
from autopar.cost.pricer import Pricer
from autopar.cost.sync import optimizer_demand, sync_demand
from autopar.graph import TensorSpec
from autopar.plan import DtypePolicy, MeshAxis


@dataclass(frozen=True)
class Rate:
    """Per element: seconds in each microbatch and once a step, and bytes held all the time."""

    micro_s: float
    step_s: float
    held_bytes: float


class ParameterRates:
    """Rates of parameters on one mesh under one dtype policy and optimizer."""

    def __init__(
        self,
        pricer: Pricer,
        mesh: tuple[MeshAxis, ...],
        policy: DtypePolicy,
        optimizer: str,
        num_microbatches: int,
        elements: int,
    ) -> None:
        """`elements` are about as many as are synchronised together: a slope is what a second time as many adds."""
        self._pricer, self._mesh, self._policy = pricer, mesh, policy
        self._optimizer, self._microbatches = optimizer, num_microbatches
        self._elements = elements
        self._rate = lru_cache(maxsize=None)(self._compute)

    def of(self, zero: int, data_axes: tuple[int, ...], further: tuple[int, ...], spec: TensorSpec) -> Rate:
        """Rate of a parameter whose gradient is summed over `data_axes` (where ZeRO shards) and `further` axes."""
        return self._rate(zero, data_axes, further, spec.requires_grad)

    def _compute(self, zero: int, data_axes: tuple[int, ...], further: tuple[int, ...], trained: bool) -> Rate:
        ways = 1
        for axis in data_axes:
            ways *= self._mesh[axis].size
        held = held_bytes_per_element(
            self._policy, self._optimizer, zero, ways, trained, gradients=self._microbatches > 1
        )
        if not trained:
            return Rate(0.0, 0.0, held)
        micro, step = [], []
        for elements in (self._elements, 2 * self._elements):
            sync = sync_demand(elements, zero, data_axes, further, self._mesh, self._policy, self._microbatches)
            updated = elements // ways if zero else elements
            micro.append(sync.micro)
            step.append(Demand.joined([sync.step, optimizer_demand([updated], self._policy, self._optimizer)]))
        return Rate(self._slope(micro, True), self._slope(step, False), held)

    def _slope(self, demands: list[Demand], hidden: bool) -> float:
        """Seconds per element between two demands, what computation can hide taken off."""
        times = price_demands(demands, self._pricer)
        compute = times.forward_compute_s + times.backward_compute_s
        communication = times.forward_communication_s + times.backward_communication_s
        total = compute + communication * (1.0 - (self._pricer.cluster.device.overlap if hidden else 0.0))
        return max(0.0, float(total[1] - total[0]) / self._elements)
