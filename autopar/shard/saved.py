"""What autograd keeps of a call beside its operands and results, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.graph import DTYPE_BYTES, Op, axes_of, largest_part, local_shape, unit_of
from autopar.shard.cuts import tensor_of
from autopar.shard.factors import LINEAR
from autopar.shard.program import Call, Program, Step


def inner_saved_bytes(call: Call, program: Program, batch: int) -> int:
    """Bytes of the tensors born inside `call` and kept for its backward, at a global microbatch of `batch` samples.

    Kernels keep their own: cross entropy over split classes one number a row in at least float32 (and the logits, an
    operand, in place of a log-softmax), dropout its mask. Of other ops each rank keeps its share of what the op keeps.
    """
    if call.kernel == "cross_entropy" and "v" in call.factors:
        width = max(DTYPE_BYTES["float32"], DTYPE_BYTES[program.values[call.operands[0]].dtype])
        return width * _local_elements(call, 1, program, batch)
    if call.kernel == "dropout":  # native_dropout returns its mask as a second result
        return _local_elements(call, 0, program, batch) if len(call.op.results) == 1 else 0
    if not call.op.saved.extra:
        return 0
    part, whole = _largest_share(call, program, batch)
    return sum(-(-spec.bytes_at(batch) * part // whole) for spec in call.op.saved.extra)


def _largest_share(call: Call, program: Program, batch: int) -> tuple[int, int]:
    """How much of a call's work the rank with most of it has: so many of so many."""
    part = whole = 1
    for factor in {*call.factors} - {"", LINEAR}:
        axes = tuple(a for a, f in enumerate(call.factors) if f == factor)
        length, unit = _length(call, program, batch, axes)
        whole *= length
        for axis in axes:
            length, unit = largest_part(length, unit, program.axis_sizes[axis])
        part *= length
    return part, whole


def _length(call: Call, program: Program, batch: int, axes: tuple[int, ...]) -> tuple[int, int]:
    """Length and unit of a dim that just these axes split."""
    for index in range(len(call.operands) + len(call.op.results)):
        name, layout = tensor_of(call, index)
        dim = layout[axes[0]]
        if dim >= 0 and axes_of(layout, dim) == axes:
            extent = program.values[name].shape[dim]
            return extent.at(batch), unit_of(extent)
    return prod(program.axis_sizes[a] for a in axes), 1


def _local_elements(call: Call, operand: int, program: Program, batch: int) -> int:
    spec = program.values[call.operands[operand]]
    return prod(local_shape(spec, batch, call.operand_layouts[operand], program.axis_sizes))


def saved_names(call: Call) -> tuple[str, ...]:
    """Names, as the call reads or makes them, of the operands and results kept for backward."""
    read_as = dict(zip(call.op.operands, call.operands, strict=True))
    kept = tuple(read_as.get(name, name) for name in call.op.saved.values)
    if call.kernel == "cross_entropy" and "v" in call.factors:
        return tuple(dict.fromkeys((*kept, *call.operands[:2])))
    return kept


def run_again(region: range, steps: Sequence[Step], light: bool = False) -> range:
    """The steps of a region that run again in the backward pass: torch stops at the last tensor that is saved.

    All do of a `light` region, whose results are wanted.
    """
    if light:
        return region
    ops = [step.op if isinstance(step, Call) else None for step in steps[region.start : region.stop]]
    end = last_saver(ops)
    own = end >= 0 and any(op is not None and saves_its_own(op) for op in ops[end : end + 1])
    return region[: max(0, end) + own]


def last_saver(ops: Sequence[Op | None]) -> int:
    """Position of the last op of which autograd saves something, -1 if there is none."""
    savers = [i for i, op in enumerate(ops) if op is not None and (op.saved.values or op.saved.extra)]
    return savers[-1] if savers else -1


def saves_its_own(op: Op) -> bool:
    """Whether autograd saves something that the op makes: it must then run to have it, else saving comes before."""
    return bool(op.saved.extra) or not {*op.results}.isdisjoint(op.saved.values)
