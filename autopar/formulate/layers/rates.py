"""Seconds and bytes that one element of a parameter costs, by how it is kept: linear, hence a lower bound.

Collectives and copies of many parameters are done together, so what a parameter adds is taken without latency: the
slope at the size of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.cost.demand import Demand, price_demands
from autopar.cost.pricer import Pricer
from autopar.cost.states import state_bytes
from autopar.cost.sync import optimizer_demand, sync_demand
from autopar.engine.stack_problem import Floats
from autopar.graph import Layout, TensorSpec
from autopar.plan import DtypePolicy, MeshAxis
from autopar.shard.storage import Axes, ParameterStorage, parameter_storage


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
        staged: bool = False,
    ) -> None:
        """`elements` are about as many as are synchronised together: a slope is what a second time as many adds.

        `known` keeps what others make of the rates.

        `staged`: whether gradients are held whole (see `Setting`).
        """
        self._pricer, self._mesh, self._policy = pricer, mesh, policy
        self._optimizer, self._microbatches = optimizer, num_microbatches
        self._elements, self._staged = elements, staged
        self._rate = lru_cache(maxsize=None)(self._compute)
        self._tables: dict[object, Floats] = {}
        self.known: dict[object, Any] = {}

    def of(self, storage: ParameterStorage, spec: TensorSpec, again: bool = True) -> Rate:
        """Rate of a parameter kept as `storage` says; `again`: gathered for the backward pass, too, under ZeRO 3."""
        return self._rate(storage, spec.requires_grad, spec.dtype, again or storage.zero != 3)

    def table(
        self, spec: TensorSpec, layouts: tuple[Layout | None, ...], zero: int, data_axes: Axes, again: bool
    ) -> Floats:
        """(3, layouts): rates of a parameter that layers read in each layout; inf seconds where there is none."""
        key = (layouts, bool(spec.shape), spec.requires_grad, spec.dtype, zero, data_axes, again)
        if key not in self._tables:
            rows = [self._row(spec, layout, zero, data_axes, again) for layout in layouts]
            self._tables[key] = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        return self._tables[key]

    def _row(
        self, spec: TensorSpec, layout: Layout | None, zero: int, data_axes: Axes, again: bool
    ) -> tuple[float, float, float]:
        if layout is None:
            return np.inf, 0.0, 0.0
        rate = self.of(parameter_storage(spec, layout, data_axes, zero), spec, again)
        return rate.micro_s, rate.step_s, rate.held_bytes

    def _compute(self, storage: ParameterStorage, trained: bool, dtype: str, again: bool) -> Rate:
        ways = storage.ways(tuple(axis.size for axis in self._mesh))
        states = state_bytes(1.0, 1.0 / ways, storage, trained, dtype, self._policy, self._optimizer, self._staged)
        held = (
            states.parameters
            + states.gathered
            + states.optimizer
            + (states.gradients if self._microbatches > 1 else 0.0)
        )
        micro, step = [], []
        for elements in (self._elements, 2 * self._elements):
            sync = sync_demand(
                elements, storage, trained, self._mesh, self._policy, self._microbatches, self._staged, again
            )
            updated = optimizer_demand([elements // ways] if trained else [], self._policy, self._optimizer)
            micro.append(sync.micro)
            step.append(Demand.joined([sync.step, updated]))
        return Rate(self._slope(micro, True), self._slope(step, False), held)

    def _slope(self, demands: list[Demand], hidden: bool) -> float:
        """Seconds per element between two demands, what computation can hide taken off."""
        times = price_demands(demands, self._pricer)
        compute = times.forward_compute_s + times.backward_compute_s
        communication = times.forward_communication_s + times.backward_communication_s
        total = compute + communication * (1.0 - (self._pricer.cluster.device.overlap if hidden else 0.0))
        return max(0.0, float(total[1] - total[0]) / self._elements)
