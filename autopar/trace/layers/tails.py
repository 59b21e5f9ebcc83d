"""What a model does between its blocks (such as adding to the residual stream) joins the block in front of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from autopar.graph import Op, TensorSpec
from autopar.trace.flat import BUFFER, PARAM, BlockCall, Flat, in_module, rename
from autopar.trace.layers.segments import Segment


@dataclass(frozen=True)
class Owned:
    """Names of parameters and buffers: every dotted one by prefixed canonical name, and the inverse."""

    names: dict[str, list[str]]
    canonical: dict[str, str]


def owned(flat: Flat) -> Owned:
    """The names in `flat`, canonical ones first."""
    names = {PARAM + n: [n] for n in flat.params} | {BUFFER + n: [n] for n in flat.buffers}
    for alias, canonical in flat.aliases.items():
        names[(PARAM if canonical in flat.params else BUFFER) + canonical].append(alias)
    return Owned(names, {name: prefixed for prefixed, each in names.items() for name in each})


def with_tails(flat: Flat, parts: list[Segment], own: Owned) -> tuple[Flat, list[Segment]]:
    """Join stretches without parameters that lie between blocks to the block in front.

    Blocks with a tail get ops of their own (renamed from the first of their kind); after the last block the same ops as
    in the tails before it are taken from the stretch that follows. `flat` comes back with specs of the new names.
    """
    tails = _tails(parts)
    kinds = {parts[i].call.kind for i in tails if parts[i].call}  # type: ignore[union-attr]
    if not kinds:
        return flat, parts
    firsts = {p.call.kind: p for p in parts if p.call and p.call.first}
    values = dict(flat.values)
    found: list[Segment] = []
    skip = 0
    for i, part in enumerate(parts):
        ops, skip = part.ops[skip:], 0
        if part.call and part.call.kind in kinds:
            skip = tails.get(i, 0)
            ops = (
                *_expanded(firsts[part.call.kind], part.call, own, values),
                *(parts[i + 1].ops[:skip] if skip else ()),
            )
            found.append(Segment(ops, path=part.path))
        elif ops or part.call:
            found.append(replace(part, ops=ops))
    return replace(flat, values=values), found


def _tails(parts: list[Segment]) -> dict[int, int]:
    """For blocks by index, how many ops of the next stretch join them."""
    found: dict[int, int] = {}
    usual: dict[int, tuple[str, ...]] = {}
    for i, (part, after) in enumerate(itertools.pairwise(parts)):
        if part.call is None or after.call is not None:
            continue
        targets = tuple(op.target for op in after.ops)
        if i + 2 < len(parts) and parts[i + 2].call and not _reads_parameters(after.ops):
            found[i] = len(targets)
            usual[part.call.kind] = targets
        elif (tail := usual.get(part.call.kind)) and targets[: len(tail)] == tail:
            found[i] = 0 if _reads_parameters(after.ops[: len(tail)]) else len(tail)
    return found


def _reads_parameters(ops: tuple[Op, ...]) -> bool:
    return any(n.startswith(PARAM) for op in ops for n in op.operands)


def _expanded(first: Segment, call: BlockCall, own: Owned, values: dict[str, TensorSpec]) -> tuple[Op, ...]:
    """The ops of the block at `call`, made from those of the first of its kind."""
    original = first.call
    if original is None or call.first:
        return first.ops
    names = dict(zip((*original.inputs, *original.results), (*call.inputs, *call.results), strict=True))
    for op in first.ops:
        names |= {n: moved(n, original.path, call.path, own) for n in op.operands if n in own.names}
        names |= {r: f"{r}@{call.path}" for r in op.results if r not in names}
    values |= {new: values[old] for old, new in names.items() if new not in values}
    ops = (rename(op, names) for op in first.ops)
    return tuple(replace(op, name=op.results[0], module=_module(op, original.path, call.path)) for op in ops)


def _module(op: Op, old: str, new: str) -> str:
    return new + op.module[len(old) :] if in_module(op, old) else op.module


def moved(prefixed: str, old: str, new: str, own: Owned) -> str:
    """The parameter that stands in block `new` where `prefixed` stands in block `old`; itself if it is in neither."""
    inside = next((n for n in own.names[prefixed] if n.startswith(f"{old}.")), None)
    if inside is None:
        return prefixed
    return own.canonical[new + inside.removeprefix(old)]
