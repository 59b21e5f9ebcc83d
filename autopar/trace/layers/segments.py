"""Where a flat list of operators is cut: at the borders of repeated blocks, else at its narrow points."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.graph import Op, TensorSpec
from autopar.trace.flat import PARAM, BlockCall, Flat, body, in_module


@dataclass(frozen=True)
class Segment:
    """A stretch of ops that becomes one layer. `path` is the block's, '' outside of blocks.

    A block whose ops are those of the first of its kind has none here and its marker in `call`; so has that first.
    """

    ops: tuple[Op, ...]
    call: BlockCall | None = None
    path: str = ""


def segments(flat: Flat) -> list[Segment]:
    """All ops of `flat` in segments, in execution order."""
    calls = [i for i in flat.items if isinstance(i, BlockCall)]
    if not calls:
        return [Segment(tuple(ops)) for ops in _at_narrow_points(flat)]
    in_blocks = {id(op) for call in calls if call.first for op in body(flat.items, call)}
    found: list[Segment] = []
    between: list[Op] = []
    inside: list[Op] = []
    for item in flat.items:
        if isinstance(item, BlockCall):
            if between:
                found.append(Segment(tuple(between)))
            found.append(Segment(tuple(inside), item, item.path))
            between, inside = [], []
        else:
            (inside if id(item) in in_blocks else between).append(item)
    return [*found, Segment(tuple(between))] if between else found


def _at_narrow_points(flat: Flat) -> list[list[Op]]:
    """Cut where exactly one activation is alive, so that each module with parameters is in a small layer."""
    ops = [i for i in flat.items if isinstance(i, Op)]
    found: list[list[Op]] = [[]]
    waiting: list[list[Op]] = []  # chunks without parameters: with the next module if they are its own
    for chunk in _chunks(ops, _alive_before(ops, flat)):
        waiting.append(chunk)
        if not _readers(chunk):
            continue
        if _readers(found[-1]) and not _same_module(found[-1], chunk):
            own = _own_start(waiting, _readers(chunk)[0].module)
            found[-1] += itertools.chain(*waiting[:own])
            found.append([])
            waiting = waiting[own:]
        found[-1] += itertools.chain(*waiting)
        waiting = []
    found[-1] += itertools.chain(*waiting)
    return found


def _own_start(chunks: list[list[Op]], module: str) -> int:
    """Index of the first of the last chunks that are all of `module`; the last chunk counts as such."""
    start = len(chunks) - 1
    while start and module and all(in_module(op, module) for op in chunks[start - 1]):
        start -= 1
    return start


def _chunks(ops: list[Op], alive: list[int]) -> Iterator[list[Op]]:
    """The ops between one narrow point and the next."""
    starts = [0, *(i for i in range(1, len(ops)) if alive[i] == 1), len(ops)]
    return (ops[a:b] for a, b in itertools.pairwise(starts) if a < b)


def _readers(ops: list[Op]) -> list[Op]:
    """The ops that read a parameter."""
    return [op for op in ops if any(name.startswith(PARAM) for name in op.operands)]


def _same_module(before: list[Op], after: list[Op]) -> bool:
    """Whether the last parameters read in `before` and the first in `after` are of one module."""
    last = _readers(before)[-1].module
    return bool(last) and in_module(_readers(after)[0], last)


def _alive_before(ops: list[Op], flat: Flat) -> list[int]:
    """For each op, how many activations made before it are read by it or later ones."""
    last_read: dict[str, int] = {name: len(ops) for name in (*flat.outputs, *filter(None, [flat.loss]))}
    for i in range(len(ops) - 1, -1, -1):
        for name in ops[i].operands:
            last_read.setdefault(name, i)
    born = {r: i for i, op in enumerate(ops) for r in op.results}
    change = [0] * (len(ops) + 2)
    for name, at in born.items():
        if name in last_read and _is_activation(flat.values[name]):
            change[at + 1] += 1
            change[last_read[name] + 1] -= 1
    counts, now = [], 0
    for i in range(len(ops)):
        now += change[i]
        counts.append(now)
    return counts


def _is_activation(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat", "complex")) and (spec.requires_grad or spec.batch_dim is not None)
