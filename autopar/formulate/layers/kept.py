"""Bytes that a layer keeps for its backward, on the labels of its space: never more than its lowered program keeps.

A storage is counted for the first op that saves it, as that op reads it; the lowered program counts it so, and once
more for each other layout it is saved in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.layers.labels import LabelSpace, at_cut
from autopar.formulate.layers.runs import Surroundings
from autopar.graph import DTYPE_BYTES, LayerClass, Layout, TensorSpec, local_shape
from autopar.shard.program import Call, Program
from autopar.shard.regions import rerun_regions
from autopar.shard.saved import inner_saved_bytes, saved_names

Bytes: TypeAlias = NDArray[np.float64]


def kept_bytes(
    space: LabelSpace, surroundings: Sequence[Surroundings], batch: int, kinds: Sequence[str]
) -> dict[str, list[Bytes]]:
    """What is kept for the backward, by kind of recomputation, for each variable on each of its labels.

    The least in any of `surroundings`, which differ in what the layer keeps for others alone.
    """
    alone = [[_kept_by(c, space, batch) for c in p.calls] for p in space.placed] if set(kinds) != {"full"} else []
    found = {}
    for kind in kinds:
        each = [
            _bytes_of_ends(space, around, batch)
            if kind == "full"
            else _saved_bytes(space, around, batch, alone, rerun_regions(space.layer, kind), kind == "light")
            for around in surroundings
        ]
        found[kind] = [np.minimum.reduce(same) for same in zip(*each, strict=True)]
    return found


def _saved_bytes(
    space: LabelSpace,
    around: Surroundings,
    batch: int,
    alone: Sequence[list[dict[str, float]]],
    regions: Sequence[frozenset[str]],
    light: bool,
) -> list[Bytes]:
    """What autograd keeps, of regions what they read from outside; `alone`: what each call keeps outside of any.

    Nobody keeps what `light` regions make.
    """
    total = [np.zeros(len(v)) for v in space.variables]
    free = {*space.layer.params, *space.layer.buffers, *around.held}
    region_of = {name: region for region in regions for name in region}
    if light:
        free |= {space.layer.root[r] for op in space.layer.ops if op.name in region_of for r in op.results}
    for placed, found in zip(space.placed, alone, strict=True):
        region = region_of.get(placed.op.name)
        if region is not None:
            found = [_kept_by(call, space, batch, region) for call in placed.calls]
        new = {root for kept in found for root in kept} - free
        each = [sum(kept[root] for root in new if root in kept) for kept in found]
        total[placed.variable] += np.array([*each, 0.0])[placed.which]
        free |= new - {""}
    return total


def _bytes_of_ends(space: LabelSpace, around: Surroundings, batch: int) -> list[Bytes]:
    """What is kept if all of the layer is recomputed: of its inputs by entry label, of its outputs by exit label."""
    layer = space.layer
    total = [np.zeros(len(v)) for v in space.variables]
    before, behind = (space.variables[v].layouts for v in (space.entry, space.exit))
    for name in layer.inputs:
        if name not in around.held:
            layouts = at_cut(layer.values[name], around.entry, before, name == around.main_input)
            total[space.entry] += [_local_bytes(name, x, space, batch) for x in layouts]
    for position, name in enumerate(layer.outputs, len(layer.inputs)):
        if position in around.promised and layer.root[name] not in layer.inputs:
            layouts = at_cut(layer.values[name], around.leave, behind, name == around.main_output)
            total[space.exit] += [_local_bytes(name, x, space, batch) for x in layouts]
    return total


def _kept_by(call: Call, space: LabelSpace, batch: int, region: frozenset[str] | None = None) -> dict[str, float]:
    """Bytes of each storage a call keeps, by its root; '' for what is born inside.

    In a region it keeps what it reads from outside, whether autograd saves that or not.
    """
    found: dict[str, float] = {}
    if region is None and (call.op.saved.extra or call.kernel):
        program = Program(space.sizes, (), (), (), (), (), {}, space.layer.values)
        found[""] = inner_saved_bytes(call, program, batch)
    for root, spec, whole, layout in _storages(call, space.layer, region):
        found[root] = _part_bytes(spec, whole, layout, space.sizes, batch)
    return found


@lru_cache(maxsize=1 << 15)
def _storages(
    call: Call, layer: LayerClass, region: frozenset[str] | None
) -> tuple[tuple[str, TensorSpec, TensorSpec, Layout], ...]:
    """The storages a call keeps by their roots, each as the first value kept that lies in it, the root and a layout."""
    layouts = dict(zip((*call.operands, *call.op.results), (*call.operand_layouts, *call.result_layouts), strict=True))
    found: dict[str, tuple[str, TensorSpec, TensorSpec, Layout]] = {}
    for name in saved_names(call) if region is None else _from_outside(call, layer, region):
        root = layer.root[name]
        found.setdefault(root, (root, layer.values[name], layer.values[root], layouts[name]))
    return tuple(found.values())


def _from_outside(call: Call, layer: LayerClass, region: frozenset[str]) -> list[str]:
    """Operands of a call that no op of its region makes."""
    return [name for name in call.operands if name not in layer.producer or layer.producer[name].name not in region]


def _local_bytes(name: str, layout: Layout, space: LabelSpace, batch: int) -> float:
    """Bytes of one rank's part of the storage in which a value lies."""
    values = space.layer.values
    return _part_bytes(values[name], values[space.layer.root[name]], layout, space.sizes, batch)


@lru_cache(maxsize=1 << 16)
def _part_bytes(spec: TensorSpec, root: TensorSpec, layout: Layout, sizes: tuple[int, ...], batch: int) -> float:
    """Less than the value's where it was expanded from its `root`."""
    local = prod(local_shape(spec, batch, layout, sizes)) * DTYPE_BYTES[spec.dtype]
    return local * min(1.0, root.bytes_at(batch) / max(1, spec.bytes_at(batch)))
