"""Work of operators that bytes limit: each tensor once a kernel that reads or writes it."""

from __future__ import annotations

from math import prod

from autopar.cost.passes import NOTHING, Formula, Pass, argument, largest, operand_bytes
from autopar.graph import DTYPE_BYTES, Dtype, Operand, OpKey


def _by_bytes(forward_passes: float, backward_passes: float, launches: int = 1) -> Formula:
    """Passes over the first operand, which the result equals in size."""

    def formula(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
        size = operand_bytes(operands[0])
        return Pass(forward_passes * size, (), launches), Pass(backward_passes * size, (), launches)

    return formula


def pointwise(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Operands and result once; backward: for each gradient read two tensors of the result's size and write one."""
    if not operands:
        return _creation(key, operands)
    sizes = [operand_bytes(o) for o in operands]
    out = largest(sizes)
    if len(operands) > 1:
        out = largest([out, _broadcast_elements(operands) * DTYPE_BYTES[operands[0].dtype]])
    gradients = sum(o.requires_grad for o in operands)
    return Pass(1.0 * (sum(sizes) + out), (), 1), Pass(3.0 * out * gradients, (), gradients)


def _sum_of_two(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """The gradient passes through; it is summed for an operand that was broadcast."""
    forward, _ = pointwise(key, operands)
    elements = _broadcast_elements(operands)
    spread = sum(prod(o.shape) < elements for o in operands if o.requires_grad)
    return forward, Pass(1.0 * elements * spread * DTYPE_BYTES[operands[0].dtype], (), spread)


def _broadcast_elements(operands: list[Operand]) -> int:
    rank = max(len(o.shape) for o in operands)
    shapes = [(1,) * (rank - len(o.shape)) + o.shape for o in operands]
    return prod(largest(list(lengths)) for lengths in zip(*shapes, strict=True))


def _creation(key: OpKey, _: list[Operand]) -> tuple[Pass, Pass]:
    shape = next((a for a in key.args if isinstance(a, tuple)), ())
    return Pass(4.0 * prod(n for n in shape if isinstance(n, int)), (), 1), NOTHING


def plain_view(_: OpKey, _operands: list[Operand]) -> tuple[Pass, Pass]:
    """Metadata only, in both directions."""
    return NOTHING, NOTHING


def _part(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A part of the operand: the gradient is a whole tensor of zeros with the part copied in."""
    return NOTHING, Pass(1.5 * operand_bytes(operands[0]), (), 2)


def _split(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    return NOTHING, Pass(2.0 * operand_bytes(operands[0]), (), 1)


def _expand(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A view; its gradient is summed over the expanded dims."""
    shape = argument(key, 1, "size", ())
    dims, own = list(shape) if isinstance(shape, tuple) else [], operands[0].shape
    kept = {i for i, n in enumerate(dims) if isinstance(n, int) and n <= 0}  # -1: as long as it is
    grown = prod(own[i - len(dims)] if i in kept else n for i, n in enumerate(dims))
    sums = 1 * (grown > prod(own))
    return NOTHING, Pass(1.0 * sums * (grown * DTYPE_BYTES[operands[0].dtype] + operand_bytes(operands[0])), (), sums)


def _embedding(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Rows read and written; the gradient fills the whole table with zeros and adds the rows."""
    table, index = operands[0], operands[1]
    rows = prod(index.shape) * table.shape[-1] * DTYPE_BYTES[table.dtype]
    return Pass(2.0 * rows + operand_bytes(index), (), 1), Pass(1.0 * operand_bytes(table) + 3 * rows, (), 2)


def reduction(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """The operand read, and its gradient written."""
    size = operand_bytes(operands[0])
    return Pass(1.0 * size, (), 1), Pass(1.0 * size, (), 1)


def _pooling(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """The image read and the smaller result written; the gradient fills the image."""
    size = operand_bytes(operands[0])
    return Pass(1.25 * size, (), 1), Pass(1.25 * size, (), 1)


def _joined(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    return Pass(2.0 * sum(map(operand_bytes, operands)), (), 1), NOTHING


def _cast(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A copy into another dtype, and back."""
    x = operands[0]
    dtype = next((a for a in (*key.args, *(v for _, v in key.kwargs)) if isinstance(a, Dtype)), Dtype(x.dtype))
    moved = 1.0 * operand_bytes(x) + prod(x.shape) * DTYPE_BYTES[dtype.name]
    return Pass(moved, (), 1), Pass(moved, (), 1)


OPTIMIZER_PASSES = {"adamw": 21.0, "adam": 19.0, "sgd": 4.0}
"""Tensors read or written by the elementwise kernels of a foreach step of torch.optim, each as large as the parameter.

adamw: mul_ 2, lerp_ 3, mul_ 2, addcmul_ 4, sqrt 2, div 2, add_ 2, addcdiv_ 4; adam decays nothing.
"""


def _optimizer_step(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    passes = OPTIMIZER_PASSES[key.target.split(".")[1]]
    return Pass(passes * operand_bytes(operands[0]), launches=1), NOTHING


def _to_host(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Copied to the host, and back."""
    one_way = Pass(launches=1, host_bytes=1.0 * operand_bytes(operands[0]))
    return one_way, one_way


def _host_step(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """An optimizer step on the host, whose memory a device's share of is taken to be as quick as its link."""
    return Pass(host_bytes=HOST_PASSES[key.target.split(".")[2]] * operand_bytes(operands[0])), NOTHING


HOST_PASSES = {"adamw": 7.0, "adam": 7.0, "sgd": 3.0}
"""Tensors read or written by a fused optimizer step: parameter and moments both ways, the gradient once."""


VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "unflatten", "flatten", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "detach", "alias", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "view_as",
    "expand_as", "movedim",
})  # fmt: skip
"""Ops that make another view of their operand, as long as its strides allow."""

_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "any", "all", "argmax", "cumsum")

MOVED: dict[str, Formula] = {
    **dict.fromkeys(OPTIMIZER_PASSES, _optimizer_step),
    "offload": _to_host,
    "host_step": _host_step,
    **dict.fromkeys(VIEWS, plain_view),
    **dict.fromkeys(("slice", "select", "narrow"), _part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split),
    "expand": _expand,
    **dict.fromkeys(("embedding", "embedding_rows"), _embedding),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "softmax", "_softmax", "_safe_softmax"), _by_bytes(2, 3)
    ),
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_functional", "group_norm"), _by_bytes(3, 5, 2)),
    **{f"{kind}_pool{n}d": _pooling for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)},
    **dict.fromkeys(("log_softmax", "_log_softmax"), _by_bytes(2, 3)),
    **dict.fromkeys(("cross_entropy_loss", "cross_entropy"), _by_bytes(2, 4, 2)),
    **dict.fromkeys(("dropout", "native_dropout"), _by_bytes(2.5, 2.5)),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(("add", "sub", "rsub"), _sum_of_two),
    **dict.fromkeys(("clone", "contiguous"), _by_bytes(2, 0)),
    "neg": _by_bytes(2, 2),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
}
"""Formulas by the operator's name."""
