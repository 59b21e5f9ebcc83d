"""What autograd keeps of a call beside its operands and results, on one rank."""

from __future__ import annotations

from math import prod

from autopar.graph import DTYPE_BYTES
from autopar.shard.factors import LINEAR
from autopar.shard.localize import local_shape_of
from autopar.shard.program import Call, Program


def inner_saved_bytes(call: Call, program: Program, batch: int) -> int:
    """Bytes of the tensors born inside `call` and kept for its backward, at a global microbatch of `batch` samples.

    Kernels keep their own: cross entropy over split classes one number a row in at least float32 (and the logits, an
    operand, in place of a log-softmax), dropout its mask. Of other ops each rank keeps its share of what the op keeps.
    """
    if call.kernel == "cross_entropy" and "v" in call.factors:
        width = max(DTYPE_BYTES["float32"], DTYPE_BYTES[program.values[call.operands[0]].dtype])
        return width * prod(local_shape_of(program, call.operands[1], batch))
    if call.kernel == "dropout":  # native_dropout returns its mask as a second result
        return prod(local_shape_of(program, call.operands[0], batch)) if len(call.op.results) == 1 else 0
    ways = prod(n for n, factor in zip(program.axis_sizes, call.factors, strict=True) if factor not in ("", LINEAR))
    return sum(-(-spec.bytes_at(batch) // ways) for spec in call.op.saved.extra)


def saved_names(call: Call) -> tuple[str, ...]:
    """Names, as the call reads or makes them, of the operands and results kept for backward."""
    read_as = dict(zip(call.op.operands, call.operands, strict=True))
    kept = tuple(read_as.get(name, name) for name in call.op.saved.values)
    if call.kernel == "cross_entropy" and "v" in call.factors:
        return tuple(dict.fromkeys((*kept, *call.operands[:2])))
    return kept
