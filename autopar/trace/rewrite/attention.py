"""Attention that drops out inside its kernel, written out: masks can then be drawn by place, like those of any dropout.

A fused kernel draws its own masks, so that replicas and a second, recomputing run would each see others.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.graph import Argument, DeviceArg, Dtype, Extent, Op, Ref, TensorSpec
from autopar.trace.flat import Flat, Item
from autopar.trace.run import argument
from autopar.trace.saved import ATTENTION, DROPOUT


def without_fused_dropout(flat: Flat) -> Flat:
    """`flat` with attention under dropout as matmul, softmax, dropout and matmul, and a note that says so."""
    values, items = dict(flat.values), list[Item]()
    places = [i for i in flat.items if isinstance(i, Op) and i.target == ATTENTION and argument(i, "dropout_p")]
    for item in flat.items:
        if isinstance(item, Op) and any(item is place for place in places):
            written = _Written(item, values)
            items += written.ops
            values |= written.made
        else:
            items.append(item)
    if not places:
        return flat
    note = (
        f"attention with dropout ({places[0].module or 'the model'}) runs as matmul, softmax, dropout and matmul: "
        f"dropout inside a fused kernel would not be the same on all ranks"
    )
    return replace(flat, items=tuple(items), values=values, assumptions=(*flat.assumptions, note))


class _Written:
    """The `ops` one attention op is made of, and the specs of what they `made`."""

    def __init__(self, op: Op, values: dict[str, TensorSpec]) -> None:
        self.ops: list[Op] = []
        self.made: dict[str, TensorSpec] = {}
        self._op, self._values = op, values
        query, key, value = (str(name) for name in op.operands[:3])
        if argument(op, "enable_gqa"):
            key, value = self._for_all_heads(key, query), self._for_all_heads(value, query)
        weights = self._add("dropout", DROPOUT, (Ref(self._weights(query, key)), argument(op, "dropout_p"), True))
        out = values[op.results[0]]
        self._add("out", "aten.matmul.default", (Ref(weights), Ref(value)), out, op.results[0])

    def _weights(self, query: str, key: str) -> str:
        """The softmax of the masked scores (..., queries, keys)."""
        q, k, op = self._spec(query), self._spec(key), self._op
        scale, mask = argument(op, "scale"), argument(op, "attn_mask")
        factor = 1 / math.sqrt(q.shape[-1].fixed) if scale is None else scale
        scaled = self._add("scaled", "aten.mul.Tensor", (Ref(query), factor), q)
        turned = replace(k, shape=(*k.shape[:-2], k.shape[-1], k.shape[-2]))
        keys = self._add("keys", "aten.transpose.int", (Ref(key), -2, -1), turned)
        shape = (*q.shape[:-1], k.shape[-2])
        scores = self._add("scores", "aten.matmul.default", (Ref(scaled), Ref(keys)), replace(q, shape=shape))
        if argument(op, "is_causal"):
            scores = self._without(scores, self._later(shape[-2], shape[-1]))
        if isinstance(mask, Ref) and self._spec(mask.name).dtype == "bool":
            blocked = self._add("blocked", "aten.logical_not.default", (mask,), self._spec(mask.name))
            scores = self._without(scores, blocked)
        elif isinstance(mask, Ref):
            scores = self._add("masked", "aten.add.Tensor", (Ref(scores), mask))
        # Of a query that may see no key nothing is left, as in the fused kernel.
        target = "aten._safe_softmax.default" if isinstance(mask, Ref) else "aten.softmax.int"
        return self._add("softmax", target, (Ref(scores), -1))

    def _without(self, scores: str, blocked: str) -> str:
        return self._add("masked", "aten.masked_fill.Scalar", (Ref(scores), Ref(blocked), -math.inf))

    def _later(self, queries: Extent, keys: Extent) -> str:
        """Which keys come behind which query."""
        spec = TensorSpec((queries, keys), "bool")
        kwargs = (("dtype", Dtype("bool")), ("device", DeviceArg()))
        whole = self._add("pairs", "aten.full.default", (_sizes(spec), True), spec, kwargs=kwargs)
        return self._add("later", "aten.triu.default", (Ref(whole), 1), spec)

    def _for_all_heads(self, name: str, query: str) -> str:
        """Keys or values (..., heads, s, d) with each head repeated for the query heads that share it."""
        spec = self._spec(name)
        *front, heads, length, width = spec.shape
        queries = self._spec(query).shape[-3]
        repeats = Extent(0, queries.fixed // heads.fixed)
        each = replace(spec, shape=(*front, heads, Extent(0, 1), length, width))
        wide = replace(spec, shape=(*front, heads, repeats, length, width))
        flat = replace(spec, shape=(*front, queries, length, width))
        apart = self._add("heads", "aten.unsqueeze.default", (Ref(name), len(spec.shape) - 2), each)
        repeated = self._add("repeated", "aten.expand.default", (Ref(apart), _sizes(wide)), wide)
        return self._add("shared", "aten.reshape.default", (Ref(repeated), _sizes(flat)), flat)

    def _spec(self, name: str) -> TensorSpec:
        return self.made[name] if name in self.made else self._values[name]

    def _add(
        self,
        word: str,
        target: str,
        args: tuple[Argument, ...],
        spec: TensorSpec | None = None,
        result: str = "",
        kwargs: tuple[tuple[str, Argument], ...] = (),
    ) -> str:
        """Append an op; its result is like its first operand unless `spec` says otherwise."""
        taken = sum(name.startswith(f"{self._op.name}@{word}") for name in self.made)
        name = result or f"{self._op.name}@{word}{taken or ''}"
        if spec is None and isinstance(args[0], Ref):
            spec = self._spec(args[0].name)
        if spec is not None:
            self.made[name] = spec
        self.ops.append(Op(name, target, args, kwargs, (name,), (None,), module=self._op.module))
        return name


def _sizes(spec: TensorSpec) -> tuple[Argument, ...]:
    return tuple(e if e.is_batch else e.fixed for e in spec.shape)
