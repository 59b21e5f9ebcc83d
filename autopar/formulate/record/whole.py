"""Operators that no rule splits: every rank runs them whole. What that takes of a step."""

from __future__ import annotations

from collections import Counter

from autopar.cost.pricer import Pricer
from autopar.formulate.layers.tables import Setting
from autopar.graph import LayerClass, Op, OpGraph, OpKey
from autopar.shard.localize import op_key
from autopar.shard.program import Call, Program
from autopar.shard.rules import rule_for


def whole_ops(graph: OpGraph, setting: Setting, pricer: Pricer) -> list[str]:
    """A sentence for each operator (by name): the module it stands in first, and its seconds a step."""
    uses = Counter(layer.class_index for layer in graph.layers)
    found: dict[str, list[tuple[Op, LayerClass, int]]] = {}
    for i, layer in enumerate(graph.classes):
        for op in layer.ops:
            if op.operands and rule_for(op, layer) is None:
                found.setdefault(op.target, []).append((op, layer, uses[i]))
    return [_sentence(target, places, setting, pricer) for target, places in found.items()]


def _sentence(target: str, places: list[tuple[Op, LayerClass, int]], setting: Setting, pricer: Pricer) -> str:
    times = pricer.ops([_whole(op, layer, setting.batch) for op, layer, _ in places])
    seconds = times.forward_s + times.backward_s
    total_s = setting.num_microbatches * sum(float(s) * count for s, (_, _, count) in zip(seconds, places, strict=True))
    times_run = sum(count for _, _, count in places)
    where = places[0][0].module or "the model itself"
    more = f" and {times_run - 1} more places" if times_run > 1 else ""
    return (
        f"{target} ({where}{more}) has no sharding rule: every rank runs it whole, {total_s * 1e3:.3g} ms of a step; "
        "autopar.register_rule gives it one"
    )


def _whole(op: Op, layer: LayerClass, batch: int) -> OpKey:
    """The op as one rank runs it that has everything."""
    names = (*op.operands, *op.results)
    alone = Program((), (), (), (), (), (), dict.fromkeys(names, ()), layer.values)
    return op_key(Call(op, op.operands, ((),) * len(op.operands), ((),) * len(op.results), ()), alone, batch)
