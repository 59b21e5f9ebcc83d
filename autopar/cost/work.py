"""Work of an operator: the matrix products and the bytes of its forward and backward pass, in closed form. Torch-free.

FLOPs are those of matrix products (multiply and add are two); all else is limited by bytes. Bytes count each tensor
once a kernel that reads or writes it. A causal attention counts half.
"""

from __future__ import annotations

from functools import cache
from math import prod

from autopar.cost.moved import MOVED, VIEWS, plain_view, pointwise
from autopar.cost.passes import NOTHING, Formula, Work, tensor_arguments
from autopar.cost.products import PRODUCTS
from autopar.graph import Extent, LayerClass, Op, Operand, OpGraph, OpKey, Ref, TensorSpec
from autopar.shard.table import PAIR_LOSSES, POINTWISE


def work(key: OpKey) -> Work:
    """Work of one local op call; those without a formula of their own count as pointwise."""
    operands = tensor_arguments(key)
    wanted = any(o.requires_grad for o in operands)
    forward, backward = _formula(key.target)(key, operands)
    kind = _ROW_KINDS.get(_name(key.target), "")
    if kind:
        rows = prod(operands[0].shape[:-1])
        forward, backward = forward._replace(rows=rows), backward._replace(rows=rows)
    dtype = operands[0].dtype if operands else "float32"
    if dtype in _REAL:  # a product of complex numbers is four of real ones
        forward, backward = (p._replace(gemms=4 * p.gemms) for p in (forward, backward))
    return Work(forward, backward if wanted else NOTHING, _REAL.get(dtype, dtype), kind)


def is_view(target: str) -> bool:
    """Whether calls of `target` only make another view of their operand (as long as its strides allow)."""
    return _name(target) in VIEWS


def is_heavy(target: str) -> bool:
    """Whether the time of an op depends on its shape in ways that its bytes don't tell."""
    return _name(target) in _HEAVY


def is_pointwise(target: str) -> bool:
    """Whether an op is elementwise, its operands broadcast against each other (sums of two excepted)."""
    return _name(target) not in _FORMULAS


def passes_gradient(target: str) -> bool:
    """Whether the gradient of an operand is (a view of) that of the result: plain views, sums, copies, joins."""
    return _formula(target) is plain_view or _name(target) in ("add", "clone", "contiguous", "cat", "stack")


def _name(target: str) -> str:
    return target.split(".")[1]


_REAL = {"complex64": "float32", "complex128": "float64"}
"""Dtypes of the parts of complex numbers."""
_ROW_KINDS = {
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "group_norm"), "layer_norm"),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"), "softmax"),
}
"""Ops that reduce rows, and the kind that stands for them in fits."""

_HEAVY = frozenset({
    "linear", "addmm", "mm", "bmm", "matmul", "einsum", "scaled_dot_product_attention", "embedding",
    "cross_entropy_loss", "layer_norm", "rms_norm", "softmax", "_safe_softmax", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "batch_norm", "group_norm",
    "_native_batch_norm_legit_functional",
})  # fmt: skip

_FORMULAS: dict[str, Formula] = {**MOVED, **PRODUCTS}


_BY_BYTES = frozenset(
    f"""
    {POINTWISE} {PAIR_LOSSES} binary_cross_entropy binary_cross_entropy_with_logits nll_loss nll_loss_nd tril triu
    arange zeros ones full empty scalar_tensor new_zeros new_ones new_full new_empty masked_fill fill zero
    index_select gather one_hot constant_pad_nd pad repeat roll flip
""".split()
)
"""Ops known to be limited by the bytes of their operands and result alone."""


def unknown_targets(graph: OpGraph) -> list[str]:
    """Ops of a model of which nothing is known here: they are priced by the bytes of their operands."""
    targets = {op.target for layer in graph.classes for op in layer.ops}
    return sorted(t for t in targets if not {_name(t)} & (_FORMULAS.keys() | _BY_BYTES))


@cache
def _formula(target: str) -> Formula:
    return _FORMULAS.get(_name(target), pointwise)


# --- a whole model ------------------------------------------------------------------------------------------------


def unsharded_key(op: Op, layer: LayerClass, batch: int) -> OpKey:
    """The key of `op` on whole tensors at `batch` samples."""

    def value(argument: object) -> object:
        if isinstance(argument, Ref):
            return operand_at(layer.values[argument.name], batch)
        if isinstance(argument, Extent):
            return argument.at(batch)
        return tuple(map(value, argument)) if isinstance(argument, tuple) else argument

    return OpKey(op.target, tuple(map(value, op.args)), tuple((k, value(v)) for k, v in op.kwargs))


def operand_at(spec: TensorSpec, batch: int) -> Operand:
    """`spec` as a whole operand at `batch` samples."""
    return Operand(spec.shape_at(batch), spec.dtype, spec.requires_grad)


def model_flops(graph: OpGraph, batch: int) -> float:
    """Model FLOPs of a training step on `batch` samples: three times the forward's where a gradient is wanted.

    Nothing recomputed is counted, and half of a causal attention: the usual definition behind "MFU"
    (PaLM, arXiv:2204.02311, appendix B, with the causal half).
    """
    return sum(layer_flops(graph, batch))


def layer_flops(graph: OpGraph, batch: int) -> list[float]:
    """`model_flops` of each layer."""
    per_class = [sum(_op_flops(op, layer, batch) for op in layer.ops) for layer in graph.classes]
    return [per_class[layer.class_index] for layer in graph.layers]


def _op_flops(op: Op, layer: LayerClass, batch: int) -> float:
    found = work(unsharded_key(op, layer, batch))
    trained = any(layer.values[name].requires_grad for name in op.operands)
    return found.forward.flops * (3 if trained else 1)
