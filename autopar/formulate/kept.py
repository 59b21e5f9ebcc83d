"""Bytes that a layer keeps for its backward, on the labels of its space: never more than its lowered program keeps.

A storage is counted for the first op that saves it, as that op reads it; the lowered program counts it so, and once
more for each other layout it is saved in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.labels import LabelSpace, Option, Placed, at_cut
from autopar.formulate.runs import Surroundings
from autopar.graph import DTYPE_BYTES, LayerClass, Layout, local_shape
from autopar.shard.program import Call, Program
from autopar.shard.regions import rerun_regions
from autopar.shard.rules import rule_for
from autopar.shard.saved import inner_saved_bytes, saved_names

Bytes: TypeAlias = NDArray[np.float64]


def call_of(placed: Placed, option: Option, layer: LayerClass) -> Call:
    """The lowered form of an op under an option."""
    op, rule = placed.op, rule_for(placed.op, layer)
    if rule is None:
        return Call(op, op.operands, option.operands, option.results, option.factors)
    kernel = rule.kernel(option.factors)
    return Call(op, op.operands, option.operands, option.results, option.factors, kernel, rule.grains)


def kept_bytes(space: LabelSpace, around: Surroundings, batch: int, recompute: str) -> list[Bytes]:
    """What is kept for the backward under a kind of recomputation, for each variable on each of its labels."""
    if recompute != "full":
        return _saved_bytes(space, around, batch, rerun_regions(space.layer, recompute))
    total = [np.zeros(len(v)) for v in space.variables]
    for v, kept in zip((space.entry, space.exit), _bytes_of_ends(space, around, batch), strict=True):
        total[v] += kept
    return total


def _saved_bytes(space: LabelSpace, around: Surroundings, batch: int, regions: Sequence[frozenset[str]]) -> list[Bytes]:
    """What autograd keeps, of regions what they read from outside."""
    total = [np.zeros(len(v)) for v in space.variables]
    free = {*space.layer.params, *space.layer.buffers, *around.held}
    region_of = {name: region for region in regions for name in region}
    for placed in space.placed:
        region = region_of.get(placed.op.name)
        found = [_kept_by(call_of(placed, o, space.layer), space, batch, region) for o in placed.distinct]
        new = {root for kept in found for root in kept} - free
        each = [sum(kept[root] for root in new if root in kept) for kept in found]
        total[placed.variable] += np.array([*each, 0.0])[placed.which]
        free |= new - {""}
    return total


def _bytes_of_ends(space: LabelSpace, around: Surroundings, batch: int) -> tuple[Bytes, Bytes]:
    """What is kept if all of the layer is recomputed: of its inputs by entry label, of its outputs by exit label."""
    layer = space.layer
    before, behind = (space.variables[v].layouts for v in (space.entry, space.exit))
    inputs, outputs = np.zeros(len(before)), np.zeros(len(behind))
    for name in layer.inputs:
        if name not in around.held:
            layouts = at_cut(layer.values[name], around.entry, before, name == around.main_input)
            inputs += [_local_bytes(name, x, space, batch) for x in layouts]
    for position, name in enumerate(layer.outputs, len(layer.inputs)):
        if position in around.promised and layer.root[name] not in layer.inputs:
            layouts = at_cut(layer.values[name], around.leave, behind, name == around.main_output)
            outputs += [_local_bytes(name, x, space, batch) for x in layouts]
    return inputs, outputs


def _kept_by(call: Call, space: LabelSpace, batch: int, region: frozenset[str] | None = None) -> dict[str, float]:
    """Bytes of each storage a call keeps, by its root; '' for what is born inside.

    In a region it keeps what it reads from outside, whether autograd saves that or not.
    """
    layer = space.layer
    layouts = dict(zip((*call.operands, *call.op.results), (*call.operand_layouts, *call.result_layouts), strict=True))
    found: dict[str, float] = {}
    if region is None:
        program = Program(space.sizes, (), (), (), (), (), layouts, layer.values)
        found[""] = inner_saved_bytes(call, program, batch)
    for name in saved_names(call) if region is None else _from_outside(call, layer, region):
        found.setdefault(layer.root[name], _local_bytes(name, layouts[name], space, batch))
    return found


def _from_outside(call: Call, layer: LayerClass, region: frozenset[str]) -> list[str]:
    """Operands of a call that no op of its region makes."""
    return [name for name in call.operands if name not in layer.producer or layer.producer[name].name not in region]


def _local_bytes(name: str, layout: Layout, space: LabelSpace, batch: int) -> float:
    """Bytes of one rank's part of the storage in which a value lies; less than the value's where it was expanded."""
    spec, root = (space.layer.values[n] for n in (name, space.layer.root[name]))
    local = prod(local_shape(spec, batch, layout, space.sizes)) * DTYPE_BYTES[spec.dtype]
    return local * min(1.0, root.bytes_at(batch) / max(1, spec.bytes_at(batch)))
