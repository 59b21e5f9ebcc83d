"""Seconds of the calls of a layer on its labels: each is priced once for all meshes that split it alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from autopar.cost.demand import Demand, price_demands
from autopar.cost.pricer import Pricer, Seconds
from autopar.cost.program import call_demand
from autopar.errors import PlanError
from autopar.formulate.layers.labels import LabelSpace, Placed
from autopar.graph import LayerClass
from autopar.plan import MeshAxis
from autopar.shard.cuts import recuts
from autopar.shard.factors import LINEAR
from autopar.shard.program import Call, Program
from autopar.shard.rules import OpRule, rule_for

Key: TypeAlias = tuple[object, ...]
"""What the seconds of a call depend on beside its op and the batch."""
ILLEGAL: Key = ("illegal",)


class _Priced(NamedTuple):
    """An op with the keys of its distinct options and what is known of them: (forward, backward) seconds."""

    placed: Placed
    keys: list[Key]
    known: dict[Key, tuple[float, float]]
    demands: dict[Key, Demand]


class CallPrices:
    """Seconds of the calls of a model's layers, kept for as long as this lives."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self._known: dict[tuple[str, str, int], dict[Key, tuple[float, float]]] = {}
        self._demands: dict[tuple[str, str, int], dict[Key, Demand]] = {}

    def of(
        self, space: LabelSpace, batch: int, mesh: tuple[MeshAxis, ...]
    ) -> Iterator[tuple[Placed, Seconds, Seconds]]:
        """Each op of the layer with forward and backward seconds on the labels of its variable; inf = illegal."""
        layer, calls = space.layer, []
        program = Program(space.sizes, (), (), (), (), (), {}, layer.values)
        for placed in space.placed:
            keys = [
                _key(call, placed.rule, program, batch, mesh) if legal else ILLEGAL
                for call, legal in zip(placed.calls, space.legal(placed, batch), strict=True)
            ]
            name = layer.digest, placed.op.name, batch
            known = self._known.setdefault(name, {ILLEGAL: (np.inf, np.inf)})
            calls.append(_Priced(placed, keys, known, self._demands.setdefault(name, {})))
        self._price(calls, program, layer, batch, mesh)
        for placed, keys, known, _ in calls:
            seconds = np.array([*(known[key] for key in keys), (np.inf, np.inf)])[placed.which]
            yield placed, seconds[:, 0], seconds[:, 1]

    def demand(self, call: Call, program: Program, layer: LayerClass, batch: int, mesh: tuple[MeshAxis, ...]) -> Demand:
        """Demand of a call of a lowered layer."""
        known = self._demands.setdefault((layer.digest, call.op.name, batch), {})
        key = _key(call, rule_for(call.op, layer), program, batch, mesh)
        if key not in known:
            known[key] = call_demand(call, program, layer, batch, mesh)
        return known[key]

    def _price(
        self, calls: list[_Priced], program: Program, layer: LayerClass, batch: int, mesh: tuple[MeshAxis, ...]
    ) -> None:
        """Price what isn't known yet, all at once."""
        new: dict[tuple[int, Key], Call] = {}
        for i, (placed, keys, known, _) in enumerate(calls):
            new |= {(i, k): call for k, call in zip(keys, placed.calls, strict=True) if k not in known}
        demands = [call_demand(call, program, layer, batch, mesh) for call in new.values()]
        for (i, key), demand in zip(new, demands, strict=True):
            calls[i].demands[key] = demand
        times = price_demands(demands, self._pricer)
        for (i, key), *seconds in zip(new, times.forward_s.tolist(), times.backward_s.tolist(), strict=True):
            calls[i].known[key] = (seconds[0], seconds[1])


def _key(call: Call, rule: OpRule | None, program: Program, batch: int, mesh: tuple[MeshAxis, ...]) -> Key:
    """Local shapes follow from how often each factor is split; what kernels, and dims cut elsewhere, send from which
    axes do so. A call that would cut samples is illegal."""
    talks = rule is not None and bool(rule.kernels)
    if call.grains:
        try:
            talks |= bool(recuts(call, program, batch))
        except PlanError:
            return ILLEGAL
    return (call.factors, mesh) if talks else _parts(call.factors, tuple(axis.size for axis in mesh))


@lru_cache(maxsize=1 << 16)
def _parts(factors: tuple[str, ...], sizes: tuple[int, ...]) -> Key:
    """Into how many parts each factor is split."""
    parts: dict[str, int] = {}
    for factor, size in zip(factors, sizes, strict=True):
        if factor not in ("", LINEAR):
            parts[factor] = parts.get(factor, 1) * size
    return tuple(sorted(parts.items()))
