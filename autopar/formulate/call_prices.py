"""Seconds of the calls of a layer on its labels: each is priced once for all meshes that split it alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from autopar.cost.demand import price_demands
from autopar.cost.pricer import Pricer, Seconds
from autopar.cost.program import call_demand
from autopar.errors import PlanError
from autopar.formulate.kept import call_of
from autopar.formulate.labels import LabelSpace, Option, Placed
from autopar.plan import MeshAxis
from autopar.shard.cuts import recuts
from autopar.shard.factors import LINEAR
from autopar.shard.program import Program
from autopar.shard.rules import rule_for

Key: TypeAlias = tuple[object, ...]
"""What the seconds of a call depend on beside its op and the batch."""
ILLEGAL: Key = ("illegal",)


class _Priced(NamedTuple):
    """An op with the keys of its distinct options and what is known of them: (forward, backward) seconds."""

    placed: Placed
    keys: list[Key]
    known: dict[Key, tuple[float, float]]


class CallPrices:
    """Seconds of the calls of a model's layers, kept for as long as this lives."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self._known: dict[tuple[str, str, int], dict[Key, tuple[float, float]]] = {}

    def of(
        self, space: LabelSpace, batch: int, mesh: tuple[MeshAxis, ...]
    ) -> Iterator[tuple[Placed, Seconds, Seconds]]:
        """Each op of the layer with forward and backward seconds on the labels of its variable; inf = illegal."""
        layer, calls = space.layer, []
        for placed in space.placed:
            rule = rule_for(placed.op, layer)
            talks = rule is not None and bool(rule.kernels)
            cuts = rule is not None and bool(rule.grains)
            recut = [cuts and self._is_recut(placed, option, space, batch) for option in placed.distinct]
            keys = [
                ILLEGAL if cut is None else _key(option, mesh, talks or cut)
                for option, cut in zip(placed.distinct, recut, strict=True)
            ]
            known = self._known.setdefault((layer.digest, placed.op.name, batch), {ILLEGAL: (np.inf, np.inf)})
            calls.append(_Priced(placed, keys, known))
        self._price(calls, space, batch, mesh)
        for placed, keys, known in calls:
            seconds = np.array([*(known[key] for key in keys), (np.inf, np.inf)])[placed.which]
            yield placed, seconds[:, 0], seconds[:, 1]

    def _is_recut(self, placed: Placed, option: Option, space: LabelSpace, batch: int) -> bool | None:
        """Whether an op under an option needs dims recut, which is sent over a group of ranks; None where it can't be,
        since samples would be cut."""
        program = Program(space.sizes, (), (), (), (), (), {}, space.layer.values)
        try:
            return bool(recuts(call_of(placed, option, space.layer), program, batch))
        except PlanError:
            return None

    def _price(self, calls: list[_Priced], space: LabelSpace, batch: int, mesh: tuple[MeshAxis, ...]) -> None:
        """Price what isn't known yet, all at once."""
        program = Program(space.sizes, (), (), (), (), (), {}, space.layer.values)
        new: dict[tuple[int, Key], Option] = {}
        for i, (placed, keys, known) in enumerate(calls):
            new |= {(i, k): option for k, option in zip(keys, placed.distinct, strict=True) if k not in known}
        demands = [
            call_demand(call_of(calls[i].placed, option, space.layer), program, space.layer, batch, mesh)
            for (i, _), option in new.items()
        ]
        times = price_demands(demands, self._pricer)
        for (i, key), *seconds in zip(new, times.forward_s.tolist(), times.backward_s.tolist(), strict=True):
            calls[i].known[key] = (seconds[0], seconds[1])


def _key(option: Option, mesh: tuple[MeshAxis, ...], talks: bool) -> Key:
    """Local shapes follow from how often each factor is split, what kernels send from which axes do so."""
    return (option.factors, mesh) if talks else _parts(option.factors, tuple(axis.size for axis in mesh))


@lru_cache(maxsize=1 << 16)
def _parts(factors: tuple[str, ...], sizes: tuple[int, ...]) -> Key:
    """Into how many parts each factor is split."""
    parts: dict[str, int] = {}
    for factor, size in zip(factors, sizes, strict=True):
        if factor not in ("", LINEAR):
            parts[factor] = parts.get(factor, 1) * size
    return tuple(sorted(parts.items()))
