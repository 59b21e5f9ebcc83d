"""What kernels communicate among themselves, beside the changes of layout that a program shows."""

from __future__ import annotations

from autopar.graph import DTYPE_BYTES, local_shape
from autopar.shard.program import Call, Program

InnerCollective = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""Kind (as in `CollectiveKey`), mesh axes, shape and dtype of the buffer."""


def inner_collectives(call: Call, program: Program, batch: int) -> tuple[InnerCollective, ...]:
    """Collectives that the kernel of a call runs in its forward pass (none runs any in its backward pass).

    Cross entropy split over classes exchanges of each row the largest logit, then the sum of exponentials and the
    target's logit, in at least float32; its mean over split rows exchanges their count, as integer.
    """
    if call.kernel != "cross_entropy":
        return ()
    logits, target = call.operands[:2]
    rows = local_shape(program.values[target].shape_at(batch), call.operand_layouts[1], program.axis_sizes)
    dtype = max("float32", program.values[logits].dtype, key=lambda name: DTYPE_BYTES[name])
    classes = tuple(i for i, f in enumerate(call.factors) if f == "v")
    counted = tuple(i for i, f in enumerate(call.factors) if f.startswith("n"))
    found: list[InnerCollective] = []
    if classes:
        found += [("all_reduce", classes, rows, dtype)] * 3
    if counted and call.op.results and not program.values[call.op.results[0]].shape:
        found.append(("all_reduce", counted, (), "int64"))
    return tuple(found)
