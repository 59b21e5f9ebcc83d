"""Work of an operator: the matrix products and the bytes of its forward and backward pass, in closed form. Torch-free.

FLOPs are those of matrix products (multiply and add are two); all else is limited by bytes. Bytes count each tensor
once a kernel that reads or writes it. A causal attention counts half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from typing import NamedTuple, TypeAlias

from autopar.graph import DTYPE_BYTES, Dtype, Extent, LayerClass, Op, Operand, OpGraph, OpKey, Ref, TensorSpec
from autopar.measure.models.attention import BACKWARD
from autopar.shard.table import PAIR_LOSSES, POINTWISE
from autopar.trace.equation import terms_of
from autopar.trace.opaque import Form, form_of


class Gemm(NamedTuple):
    """`batch` products (m, k) @ (k, n) in one kernel, and the bytes they move."""

    m: int
    n: int
    k: int
    batch: int
    bytes: float

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return 2.0 * self.batch * self.m * self.n * self.k


class Attention(NamedTuple):
    """One call of fused attention; `passes` is what it takes in forward calls' seconds, `flops` those of its products.

    Query heads share the key and value heads evenly.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    head_dim: int
    causal: bool
    passes: float
    flops: float


class Pass(NamedTuple):
    """Work of one direction: bytes moved, matrix products, kernels started, attention, and rows that are reduced."""

    bytes: float = 0.0
    gemms: tuple[Gemm, ...] = ()
    launches: int = 0
    attention: tuple[Attention, ...] = ()
    rows: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products."""
        return sum(g.flops for g in self.gemms) + sum(a.flops for a in self.attention)


class Work(NamedTuple):
    """Work of an op, forward and backward, the dtype its products are computed in, and its kind of reduction, if any.

    Kinds are `layer_norm` (all norms over the last dims) and `softmax`.
    """

    forward: Pass
    backward: Pass
    dtype: str
    kind: str = ""


NOTHING = Pass()


def work(key: OpKey) -> Work:
    """Work of one local op call; those without a formula of their own count as pointwise."""
    operands = tensor_arguments(key)
    wanted = any(o.requires_grad for o in operands)
    forward, backward = _formula(key.target)(key, operands)
    kind = _ROW_KINDS.get(_name(key.target), "")
    if kind:
        rows = prod(operands[0].shape[:-1])
        forward, backward = forward._replace(rows=rows), backward._replace(rows=rows)
    return Work(forward, backward if wanted else NOTHING, operands[0].dtype if operands else "float32", kind)


def tensor_arguments(key: OpKey) -> list[Operand]:
    """The tensors among the arguments of `key`, in order, those inside lists included."""
    found = []
    for a in key.args:
        if type(a) is Operand:
            found.append(a)
        elif type(a) is tuple:
            found.extend(b for b in a if type(b) is Operand)
    found.extend(v for _, v in key.kwargs if type(v) is Operand)
    return found


def operand_bytes(operand: Operand) -> int:
    """Bytes of a tensor argument."""
    return prod(operand.shape) * DTYPE_BYTES[operand.dtype]


def is_view(target: str) -> bool:
    """Whether calls of `target` only make another view of their operand (as long as its strides allow)."""
    return _name(target) in _VIEWS


def is_heavy(target: str) -> bool:
    """Whether the time of an op depends on its shape in ways that its bytes don't tell."""
    return _name(target) in _HEAVY


def is_pointwise(target: str) -> bool:
    """Whether an op is elementwise, its operands broadcast against each other (sums of two excepted)."""
    return _name(target) not in _FORMULAS


def passes_gradient(target: str) -> bool:
    """Whether the gradient of an operand is (a view of) that of the result: plain views, sums, copies, joins."""
    return _formula(target) is _view or _name(target) in ("add", "clone", "contiguous", "cat", "stack")


def _name(target: str) -> str:
    return target.split(".")[1]


def _argument(key: OpKey, position: int, name: str, default: object) -> object:
    if len(key.args) > position:
        return key.args[position]
    return dict(key.kwargs).get(name, default)


# --- matrix products --------------------------------------------------------------------------------------------

Formula: TypeAlias = Callable[[OpKey, list[Operand]], tuple[Pass, Pass]]


def _product(
    sizes: tuple[int, int, int, int], a: Operand, b: Operand, bias: Operand | None = None
) -> tuple[Pass, Pass]:
    """Passes of `batch` times (m, k) @ (k, n): the gradient of each factor that wants one is one more product."""
    batch, m, n, k = sizes
    size = DTYPE_BYTES[a.dtype]
    left, right, out = batch * m * k * size, prod(b.shape) * size, batch * m * n * size
    once = left + right + out
    gemms: tuple[Gemm, ...] = ()
    moved, extra = 0, 0
    if a.requires_grad:
        gemms += (Gemm(m, k, n, batch, once),)
        moved += once
    if b.requires_grad:
        gemms += (Gemm(n, k, m, batch, once),)
        moved += once
    if bias is not None and bias.requires_grad:
        moved, extra = moved + out, 1
    return (
        Pass(once, (Gemm(m, n, k, batch, once),), 1),
        Pass(moved, gemms, len(gemms) + extra),
    )


def _linear(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    x, weight = operands[0], operands[1]
    n, k = weight.shape
    bias = operands[2] if len(operands) > 2 else None
    return _product((1, prod(x.shape[:-1]), n, k), x, weight, bias)


def _addmm(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    bias, a, b = operands
    forward, backward = _matmul(key, [a, b])
    return forward, backward._replace(launches=backward.launches + bias.requires_grad)


def _matmul(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    a, b = operands[0], operands[1]
    n = b.shape[-1] if len(b.shape) > 1 else 1
    k = a.shape[-1]
    if len(b.shape) <= 2:  # the batch dims of `a` fold into its rows
        return _product((1, prod(a.shape[:-1]), n, k), a, b)
    m = a.shape[-2] if len(a.shape) > 1 else 1
    batch = max(prod(a.shape[:-2]), prod(b.shape[:-2]))
    return _product((batch, m, n, k), a, b)


def _einsum(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Operands are multiplied from left to right: labels that both have and nothing needs later are summed over."""
    terms, made = terms_of(str(key.args[0]), [len(o.shape) for o in operands])
    sizes = {label: n for o, term in zip(operands, terms, strict=True) for label, n in zip(term, o.shape, strict=True)}

    def extent(labels: Iterable[str]) -> int:
        return prod(sizes[label] for label in labels)

    left, have, forward, backward = operands[0], terms[0], NOTHING, NOTHING
    for i, (right, term) in enumerate(zip(operands[1:], terms[1:], strict=True), start=2):
        later = {label for t in (*terms[i:], made) for label in t}
        both, own = [c for c in have if c in term], [c for c in term if c not in have]
        batch, summed = [c for c in both if c in later], [c for c in both if c not in later]
        rows = [c for c in have if c not in term]
        one, other = _product((extent(batch), extent(rows), extent(own), extent(summed)), left, right)
        forward, backward = _both(forward, one), _both(backward, other)
        have = tuple(c for c in (*have, *own) if c in later)
        left = Operand(tuple(sizes[c] for c in have), left.dtype, left.requires_grad or right.requires_grad)
    return (forward, backward) if len(operands) > 1 else _reduction(key, operands)


def _both(one: Pass, other: Pass) -> Pass:
    return Pass(one.bytes + other.bytes, one.gemms + other.gemms, one.launches + other.launches)


def _attention(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Flash attention (arXiv:2205.14135): the products of scores and values; five in the backward, scores redone."""
    q, k, v = operands[0], operands[1], operands[2]
    batch, rows, columns = prod(q.shape[:-2]), q.shape[-2], k.shape[-2]
    heads = q.shape[-3] if len(q.shape) > 2 else 1
    shared = k.shape[-3] if len(k.shape) > 2 else 1
    causal = bool(_argument(key, 5, "is_causal", False))
    product = 2.0 * (0.5 if causal else 1.0) * batch * rows * columns
    scores, values = product * q.shape[-1], product * v.shape[-1]
    call = Attention(batch // heads, heads, shared, rows, columns, q.shape[-1], causal, 1.0, scores + values)
    back = call._replace(passes=BACKWARD, flops=3 * scores + 2 * values)
    moved = sum(operand_bytes(o) for o in operands) + operand_bytes(q)
    return Pass(moved, (), 1, (call,)), Pass(2.0 * moved, (), 1, (back,))


# --- all else: by bytes -----------------------------------------------------------------------------------------


def _opaque(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A submodule as one operator: FLOPs as counted when it was tried, as one product for each row of its input."""
    form = form_of(str(key.args[1]))
    given = operands[len(form.names) :]
    size = sum(map(operand_bytes, operands))
    flops = form.flops * _samples(form, given)
    if not flops:
        return Pass(2.0 * size, (), 1), Pass(4.0 * size, (), 1)
    width = max((o.shape[-1] for o in given if o.shape), default=1)
    rows = max(1, round(flops / (2 * width * width)))
    gemm = Gemm(rows, width, width, 1, size)
    return Pass(size, (gemm,), 1), Pass(2.0 * size, (gemm, gemm), 2)


def _samples(form: Form, given: list[Operand]) -> float:
    """How many samples the local arguments hold: FLOPs are told by elements of the largest of them."""
    largest = max((prod(o.shape) for o in given), default=0)
    return largest / form.elements if form.elements else 1.0


def _by_bytes(forward_passes: float, backward_passes: float, launches: int = 1) -> Formula:
    """Passes over the first operand, which the result equals in size."""

    def formula(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
        size = operand_bytes(operands[0])
        return Pass(forward_passes * size, (), launches), Pass(backward_passes * size, (), launches)

    return formula


def _pointwise(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Operands and result once; backward: for each gradient read two tensors of the result's size and write one."""
    if not operands:
        return _creation(key, operands)
    sizes = [operand_bytes(o) for o in operands]
    out = max(sizes)
    if len(operands) > 1:
        out = max(out, _broadcast_elements(operands) * DTYPE_BYTES[operands[0].dtype])
    gradients = sum(o.requires_grad for o in operands)
    return Pass(float(sum(sizes) + out), (), 1), Pass(3.0 * out * gradients, (), gradients)


def _sum_of_two(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """The gradient passes through; it is summed for an operand that was broadcast."""
    forward, _ = _pointwise(key, operands)
    elements = _broadcast_elements(operands)
    spread = [o for o in operands if o.requires_grad and prod(o.shape) < elements]
    return forward, Pass(float(elements * len(spread) * DTYPE_BYTES[operands[0].dtype]), (), len(spread))


def _broadcast_elements(operands: list[Operand]) -> int:
    rank = max(len(o.shape) for o in operands)
    shapes = [(1,) * (rank - len(o.shape)) + o.shape for o in operands]
    return prod(map(max, *shapes)) if len(shapes) > 1 else prod(shapes[0])


def _creation(key: OpKey, _: list[Operand]) -> tuple[Pass, Pass]:
    shape = next((a for a in key.args if isinstance(a, tuple)), ())
    return Pass(4.0 * prod(n for n in shape if isinstance(n, int)), (), 1), NOTHING


def _view(_: OpKey, _operands: list[Operand]) -> tuple[Pass, Pass]:
    return NOTHING, NOTHING


def _part(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A part of the operand: the gradient is a whole tensor of zeros with the part copied in."""
    return NOTHING, Pass(1.5 * operand_bytes(operands[0]), (), 2)


def _split(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    return NOTHING, Pass(2.0 * operand_bytes(operands[0]), (), 1)


def _expand(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A view; its gradient is summed over the expanded dims."""
    shape = _argument(key, 1, "size", ())
    dims = [n for n in shape if isinstance(n, int)] if isinstance(shape, tuple) else []
    own = operands[0].shape
    grown = prod(n if n > 0 else own[i - len(dims)] for i, n in enumerate(dims) if n > 0 or len(dims) - i <= len(own))
    if grown <= prod(own):
        return NOTHING, NOTHING
    return NOTHING, Pass(float(grown * DTYPE_BYTES[operands[0].dtype] + operand_bytes(operands[0])), (), 1)


def _embedding(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Rows read and written; the gradient fills the whole table with zeros and adds the rows."""
    table, index = operands[0], operands[1]
    rows = prod(index.shape) * table.shape[-1] * DTYPE_BYTES[table.dtype]
    return Pass(2.0 * rows + operand_bytes(index), (), 1), Pass(float(operand_bytes(table) + 3 * rows), (), 2)


def _reduction(_: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    size = operand_bytes(operands[0])
    return Pass(float(size), (), 1), Pass(float(size), (), 1)


def _convolution(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """As the matrix product it is: each position of the result sums over a kernel's window of the input's channels."""
    x, weight = operands[0], operands[1]
    outputs, window = weight.shape[0], prod(weight.shape[1:])
    rows = x.shape[0] * prod(_positions(key, x.shape[2:], weight.shape[2:]))
    groups = _argument(key, 6, "groups", 1)
    batch = groups if isinstance(groups, int) else 1
    bias = operands[2] if len(operands) > 2 else None
    forward, backward = _product((batch, rows, outputs // batch, window), x, weight, bias)
    unfolded = (batch * rows * window - prod(x.shape)) * DTYPE_BYTES[x.dtype]
    return _less(forward, unfolded), _less(backward, unfolded)  # a product's left side is read from the input itself


def _less(one: Pass, moved: float) -> Pass:
    """The pass with `moved` bytes less for each product."""
    gemms = tuple(g._replace(bytes=g.bytes - moved) for g in one.gemms)
    return one._replace(bytes=one.bytes - moved * len(gemms), gemms=gemms)


def _transposed_convolution(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """As the matrix product it is: each position of the input makes a kernel's window of the result's channels."""
    x, weight = operands[0], operands[1]
    groups = _argument(key, 6, "groups", 1)
    batch = groups if isinstance(groups, int) else 1
    rows, inputs, window = x.shape[0] * prod(x.shape[2:]), weight.shape[0] // batch, prod(weight.shape[1:])
    bias = operands[2] if len(operands) > 2 else None
    return _product((batch, rows, window, inputs), x, weight, bias)


def _positions(key: OpKey, image: tuple[int, ...], kernel: tuple[int, ...]) -> list[int]:
    """Shape of the result in space."""
    padding = _argument(key, 4, "padding", 0)
    if padding == "same":
        return list(image)
    strides, paddings, dilations = (
        _each(value, len(image))
        for value in (_argument(key, 3, "stride", 1), padding, _argument(key, 5, "dilation", 1))
    )
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(image, kernel, strides, paddings, dilations, strict=True)
    ]


def _each(value: object, dims: int) -> list[int]:
    """A number for every dim, from one for all or a tuple; padding `valid` is none."""
    given = value if isinstance(value, tuple) else (value,)
    numbers = [n if isinstance(n, int) else 0 for n in given]
    return numbers * dims if len(numbers) == 1 else numbers


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
    moved = float(operand_bytes(x) + prod(x.shape) * DTYPE_BYTES[dtype.name])
    return Pass(moved, (), 1), Pass(moved, (), 1)


_VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "unflatten", "flatten", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "detach", "alias", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "view_as",
    "expand_as", "movedim",
})  # fmt: skip
_ROW_KINDS = {
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "group_norm"), "layer_norm"),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"), "softmax"),
}
"""Ops that reduce rows, and the kind that stands for them in fits."""

_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "any", "all", "argmax", "cumsum")

_HEAVY = frozenset({
    "linear", "addmm", "mm", "bmm", "matmul", "einsum", "scaled_dot_product_attention", "embedding",
    "cross_entropy_loss", "layer_norm", "rms_norm", "softmax", "_safe_softmax", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "batch_norm", "group_norm",
    "_native_batch_norm_legit_functional",
})  # fmt: skip

OPTIMIZER_PASSES = {"adamw": 21.0, "adam": 19.0, "sgd": 4.0}
"""Tensors read or written by the elementwise kernels of a foreach step of torch.optim, each as large as the parameter.

adamw: mul_ 2, lerp_ 3, mul_ 2, addcmul_ 4, sqrt 2, div 2, add_ 2, addcdiv_ 4; adam decays nothing.
"""


def _optimizer_step(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    passes = OPTIMIZER_PASSES[_name(key.target)]
    return Pass(passes * operand_bytes(operands[0]), launches=1), NOTHING


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(OPTIMIZER_PASSES, _optimizer_step),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(("slice", "select", "narrow"), _part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split),
    "expand": _expand,
    "linear": _linear,
    "opaque": _opaque,
    "addmm": _addmm,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("embedding", "embedding_rows"), _embedding),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "softmax", "_softmax", "_safe_softmax"), _by_bytes(2, 3)
    ),
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_functional", "group_norm"), _by_bytes(3, 5, 2)),
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _transposed_convolution for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pooling for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)},
    **dict.fromkeys(("log_softmax", "_log_softmax"), _by_bytes(2, 3)),
    **dict.fromkeys(("cross_entropy_loss", "cross_entropy"), _by_bytes(2, 4, 2)),
    **dict.fromkeys(("dropout", "native_dropout"), _by_bytes(2.5, 2.5)),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("add", "sub", "rsub"), _sum_of_two),
    **dict.fromkeys(("clone", "contiguous"), _by_bytes(2, 0)),
    "neg": _by_bytes(2, 2),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
}


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
    return _FORMULAS.get(_name(target), _pointwise)


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
    per_class = [sum(_op_flops(op, layer, batch) for op in layer.ops) for layer in graph.classes]
    return sum(per_class[layer.class_index] for layer in graph.layers)


def _op_flops(op: Op, layer: LayerClass, batch: int) -> float:
    found = work(unsharded_key(op, layer, batch))
    trained = any(layer.values[name].requires_grad for name in op.operands)
    return found.forward.flops * (3 if trained else 1)
