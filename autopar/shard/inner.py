"""What calls communicate among themselves, beside the changes of layout that a program shows."""

from __future__ import annotations

from autopar.graph import DTYPE_BYTES, local_shape
from autopar.shard.cuts import recuts, seen_shape, tensor_of
from autopar.shard.program import Call, Program

InnerCollective = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""Kind (as in `CollectiveKey`), mesh axes, shape and dtype of the buffer."""


def inner_collectives(call: Call, program: Program, batch: int) -> tuple[InnerCollective, ...]:
    """Collectives that a call runs in its forward pass, beside what the program shows.

    What is recut is exchanged by neighbours. Cross entropy split over classes exchanges of each row the largest logit,
    then the sum of exponentials and the target's logit together, in at least float32; its mean over split rows
    exchanges their count, as integer. Batch norm over split samples exchanges mean, then variance of each channel.
    """
    if call.grains:
        return _exchanged(call, program, batch, trained=False)
    if call.kernel == "batch_norm":
        return _statistics(call, program, (1, 1), batch)
    if call.kernel != "cross_entropy":
        return ()
    logits, target = call.operands[:2]
    rows = local_shape(program.values[target], batch, call.operand_layouts[1], program.axis_sizes)
    classes = tuple(i for i, f in enumerate(call.factors) if f == "v")
    counted = tuple(i for i, f in enumerate(call.factors) if f.startswith("n"))
    found: list[InnerCollective] = []
    if classes:
        wide = _wide(program.values[logits].dtype)
        found += [("all_reduce", classes, rows, wide), ("all_reduce", classes, (2, *rows), wide)]
    if counted and call.op.results and not program.values[call.op.results[0]].shape:
        found.append(("all_reduce", counted, (), "int64"))
    return tuple(found)


def inner_collectives_backward(call: Call, program: Program, batch: int) -> tuple[InnerCollective, ...]:
    """Collectives that a call runs in its backward pass: batch norm exchanges two numbers a channel.

    The gradients of what is recut go back.
    """
    if call.grains:
        return _exchanged(call, program, batch, trained=True)
    trained = any(program.values[name].requires_grad for name in call.operands)
    return _statistics(call, program, (2,), batch) if call.kernel == "batch_norm" and trained else ()


def _exchanged(call: Call, program: Program, batch: int, trained: bool) -> tuple[InnerCollective, ...]:
    """One exchange for each dim that is recut, priced as if all that a rank holds were sent."""
    found: list[InnerCollective] = []
    for recut in recuts(call, program, batch):
        spec = program.values[tensor_of(call, recut.index)[0]]
        if spec.requires_grad or not trained:
            shape = seen_shape(call, program, recut.index, batch)
            found.append(("all_to_all", recut.axes, shape, spec.dtype))
    return tuple(found)


def _statistics(call: Call, program: Program, numbers: tuple[int, ...], batch: int) -> tuple[InnerCollective, ...]:
    """One exchange for each of `numbers`, of so many numbers a channel."""
    x = program.values[call.operands[0]]
    channels = local_shape(x, batch, call.operand_layouts[0], program.axis_sizes)[1]
    samples = tuple(i for i, f in enumerate(call.factors) if f == "b")
    return tuple(("all_reduce", samples, (n, channels), _wide(x.dtype)) for n in numbers)


def _wide(dtype: str) -> str:
    return max("float32", dtype, key=DTYPE_BYTES.__getitem__)
