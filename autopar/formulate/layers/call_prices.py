"""Seconds of the calls of a layer on its labels: each is priced once for all meshes and batches that leave a rank the
same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from autopar.cost.demand import Demand, price_demands
from autopar.cost.pricer import Pricer, Seconds
from autopar.cost.program import call_demand
from autopar.errors import PlanError
from autopar.formulate.layers.labels import LabelSpace, Placed
from autopar.graph import Extent, LayerClass, Op
from autopar.plan import MeshAxis
from autopar.shard.cuts import recuts
from autopar.shard.factors import LINEAR
from autopar.shard.localize import SIZES_AT
from autopar.shard.program import Call, Program
from autopar.shard.rules import OpRule, rule_for

Key: TypeAlias = tuple[object, ...]
"""What the seconds of a call depend on beside its op and the batch."""
ILLEGAL: Key = ("illegal",)


class _Form(NamedTuple):
    """What the key of a call is made of, whatever the batch: of how many `ways` samples are split (0: the batch itself
    counts), the other `parts`, and all of them."""

    call: Call
    talks: bool
    ways: int
    parts: tuple[object, ...]
    every: tuple[object, ...]


class _Priced(NamedTuple):
    """An op with the keys of its distinct options at each batch and what is known of them: (forward, backward)
    seconds."""

    placed: Placed
    keys: list[list[Key]]
    known: dict[Key, tuple[float, float]]
    demands: dict[Key, Demand]


class CallPrices:
    """Seconds of the calls of a model's layers, kept for as long as this lives."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self._known: dict[tuple[str, str], dict[Key, tuple[float, float]]] = {}
        self._demands: dict[tuple[str, str], dict[Key, Demand]] = {}
        self._by_samples: dict[tuple[str, str], str] = {}
        self._forms: dict[tuple[LabelSpace, str], list[_Form]] = {}

    def of(
        self, space: LabelSpace, batches: Sequence[int], mesh: tuple[MeshAxis, ...]
    ) -> Iterator[tuple[Placed, Seconds, Seconds]]:
        """Each op of the layer with forward and backward seconds (batches, labels) on the labels of its variable; inf =
        illegal."""
        layer, calls = space.layer, []
        program = Program(space.sizes, (), (), (), (), (), {}, layer.values)
        for placed in space.placed:
            name = layer.digest, placed.op.name
            known = self._known.setdefault(name, {ILLEGAL: (np.inf, np.inf)})
            keys = [self._keys(placed, space, program, batch, mesh) for batch in batches]
            calls.append(_Priced(placed, keys, known, self._demands.setdefault(name, {})))
        self._price(calls, program, layer, batches, mesh)
        nothing = (np.inf, np.inf)
        for placed, keys, known, _ in calls:
            seconds = np.array([[*(known[key] for key in own), nothing] for own in keys])[:, placed.which]
            yield placed, seconds[..., 0], seconds[..., 1]

    def demand(self, call: Call, program: Program, layer: LayerClass, batch: int, mesh: tuple[MeshAxis, ...]) -> Demand:
        """Demand of a call of a lowered layer."""
        known = self._demands.setdefault((layer.digest, call.op.name), {})
        key = _key(self._form(call, rule_for(call.op, layer), program.axis_sizes, layer), program, batch, mesh)
        if key not in known:
            known[key] = call_demand(call, program, layer, batch, mesh)
        return known[key]

    def _price(
        self,
        calls: list[_Priced],
        program: Program,
        layer: LayerClass,
        batches: Sequence[int],
        mesh: tuple[MeshAxis, ...],
    ) -> None:
        """Price what isn't known yet, all at once."""
        new: dict[tuple[int, Key], tuple[Call, int]] = {}
        for i, (placed, keys, known, _) in enumerate(calls):
            for batch, own in zip(batches, keys, strict=True):
                new |= {(i, k): (call, batch) for k, call in zip(own, placed.calls, strict=True) if k not in known}
        demands = [call_demand(call, program, layer, batch, mesh) for call, batch in new.values()]
        for (i, key), demand in zip(new, demands, strict=True):
            calls[i].demands[key] = demand
        times = price_demands(demands, self._pricer)
        for (i, key), *seconds in zip(new, times.forward_s.tolist(), times.backward_s.tolist(), strict=True):
            calls[i].known[key] = (seconds[0], seconds[1])

    def _keys(
        self, placed: Placed, space: LabelSpace, program: Program, batch: int, mesh: tuple[MeshAxis, ...]
    ) -> list[Key]:
        """Of the distinct options of an op at a batch."""
        name = space, placed.op.name
        if name not in self._forms:
            self._forms[name] = [self._form(call, placed.rule, space.sizes, space.layer) for call in placed.calls]
        return [
            _key(form, program, batch, mesh) if legal else ILLEGAL
            for form, legal in zip(self._forms[name], space.legal(placed, batch), strict=True)
        ]

    def _form(self, call: Call, rule: OpRule | None, sizes: tuple[int, ...], layer: LayerClass) -> _Form:
        parts = _parts(call.factors, sizes)
        by_sample, every = self._by_sample(call.op, rule, layer), tuple(parts.items())
        ways = parts.get(by_sample, 1) if by_sample else 0
        others = tuple(item for item in every if item[0] != by_sample)
        return _Form(call, rule is not None and bool(rule.kernels), ways, others, every)

    def _by_sample(self, op: Op, rule: OpRule | None, layer: LayerClass) -> str:
        name = layer.digest, op.name
        if name not in self._by_samples:
            self._by_samples[name] = "" if rule is None else _by_sample(op, rule, layer)
        return self._by_samples[name]


def _key(form: _Form, program: Program, batch: int, mesh: tuple[MeshAxis, ...]) -> Key:
    """Local shapes follow from how often each factor is split, and from how many samples a rank has where all that
    grows with the batch is split by one factor; what kernels, and dims cut elsewhere, send from which axes do so. A
    call that would cut samples is illegal."""
    call, talks, ways, parts, every = form
    if call.grains:
        try:
            talks |= bool(recuts(call, program, batch))
        except PlanError:
            return ILLEGAL
    if talks:
        return batch, call.factors, mesh
    return (batch, *every) if not ways or batch % ways else (batch // ways, *parts)


@lru_cache(maxsize=1 << 16)
def _parts(factors: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Into how many parts each factor is split."""
    parts: dict[str, int] = {}
    for factor, size in zip(factors, sizes, strict=True):
        if factor not in ("", LINEAR):
            parts[factor] = parts.get(factor, 1) * size
    return dict(sorted(parts.items()))


def _by_sample(op: Op, rule: OpRule, layer: LayerClass) -> str:
    """The factor that splits all dims that grow with the batch, of an op that knows the batch by them alone; or ''."""
    grows = {
        factor if extent.fixed == 0 else ""
        for names, dims in ((op.operands, rule.operands), (op.results, rule.results))
        for name, factors in zip(names, dims, strict=True)
        for extent, factor in zip(layer.values[name].shape, factors, strict=True)
        if extent.is_batch
    }
    sized = op.target.split(".")[1] in SIZES_AT
    known = not sized and any(isinstance(a, Extent) and a.is_batch for a in _leaves((op.args, op.kwargs)))
    return grows.pop() if len(grows) == 1 and not known else ""


def _leaves(argument: object) -> Iterator[object]:
    if isinstance(argument, tuple):
        for one in argument:
            yield from _leaves(one)
    else:
        yield argument
