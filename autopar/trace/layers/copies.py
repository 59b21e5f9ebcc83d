"""What a layer gives to others and shares the storage of a parameter (a token, expanded to the batch) becomes a copy.

A parameter that is dealt out over ranks is gathered for its layer alone, and gone when others read a view of it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.graph import Op, Ref
from autopar.trace.flat import PARAM, Flat
from autopar.trace.layers.segments import Segment


def last_reader(flat: Flat, parts: list[Segment]) -> dict[str, int]:
    """Index of the last segment that reads each value; those the model returns are read after the last."""
    found: dict[str, int] = {}
    for i, part in enumerate(parts):
        names = [n for op in part.ops for n in op.operands]
        if part.call and not part.call.first:
            names += part.call.inputs
        found |= dict.fromkeys(names, i)
    return found | dict.fromkeys((*flat.outputs, *flat.updates.values()), len(parts))


def with_copies(flat: Flat, parts: list[Segment]) -> tuple[Flat, list[Segment]]:
    """`parts` with a copy of each view of a parameter that a later part reads; `flat` has the specs of new names."""
    read_by = last_reader(flat, parts)
    values = dict(flat.values)
    found: list[Segment] = []
    for i, part in enumerate(parts):
        views = {n for n in _views(part.ops) if read_by.get(n, -1) > i or (part.call and n in part.call.results)}
        values |= {f"{n}@view": values[n] for n in views}
        found.append(replace(part, ops=tuple(new for op in part.ops for new in _copied(op, views))) if views else part)
    return replace(flat, values=values), found


def _views(ops: tuple[Op, ...]) -> set[str]:
    """The results that share the storage of a parameter."""
    found: set[str] = set()
    for op in ops:
        pairs = zip(op.results, op.alias_of, strict=True)
        found |= {result for result, of in pairs if of is not None and (of in found or of.startswith(PARAM))}
    return found


def _copied(op: Op, views: set[str]) -> list[Op]:
    """`op`, and copies of those of its results that are among the views, which take their names."""
    mine = [r for r in op.results if r in views]
    if not mine:
        return [op]
    names = {r: f"{r}@view" for r in mine}
    viewing = replace(op, name=names.get(op.name, op.name), results=tuple(names.get(r, r) for r in op.results))
    copies = (Op(r, "aten.clone.default", (Ref(names[r]),), (), (r,), (None,), module=op.module) for r in mine)
    return [viewing, *copies]
