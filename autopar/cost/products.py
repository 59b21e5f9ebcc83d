"""Work of operators that are matrix products, attention included: their sizes, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from autopar.cost.moved import reduction
from autopar.cost.passes import NOTHING, Attention, Formula, Gemm, Pass, argument, largest, operand_bytes
from autopar.graph import DTYPE_BYTES, Operand, OpKey
from autopar.measure.models.attention import BACKWARD
from autopar.trace.opaque.operator import Form, form_of
from autopar.trace.rewrite.equation import terms_of


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
    batch = largest([prod(a.shape[:-2]), prod(b.shape[:-2])])
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
    return (forward, backward) if len(operands) > 1 else reduction(key, operands)


def _both(one: Pass, other: Pass) -> Pass:
    return Pass(one.bytes + other.bytes, one.gemms + other.gemms, one.launches + other.launches)


def _attention(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """Flash attention (arXiv:2205.14135): the products of scores and values; five in the backward, scores redone."""
    q, k, v = operands[0], operands[1], operands[2]
    batch, rows, columns = prod(q.shape[:-2]), q.shape[-2], k.shape[-2]
    heads = q.shape[-3] if len(q.shape) > 2 else 1
    shared = k.shape[-3] if len(k.shape) > 2 else 1
    causal = bool(argument(key, 5, "is_causal", False))
    product = 2.0 * (0.5 if causal else 1.0) * batch * rows * columns
    scores, values = product * q.shape[-1], product * v.shape[-1]
    call = Attention(batch // heads, heads, shared, rows, columns, q.shape[-1], causal, 1.0, scores + values)
    back = call._replace(passes=BACKWARD, flops=3 * scores + 2 * values)
    moved = sum(operand_bytes(o) for o in operands) + operand_bytes(q)
    return Pass(moved, (), 1, (call,)), Pass(2.0 * moved, (), 1, (back,))


def _opaque(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """A submodule as one operator: FLOPs as counted when it was tried, as one product for each row of its input."""
    form = form_of(str(key.args[1]))
    given = operands[len(form.names) :]
    size = sum(map(operand_bytes, operands))
    flops = form.flops * _samples(form, given)
    if not form.flops:
        return Pass(2.0 * size, (), 1), Pass(4.0 * size, (), 1)
    width = largest([1, *(o.shape[-1] for o in given if o.shape)])
    rows = largest([1, flops // (2 * width * width)])
    gemm = Gemm(rows, width, width, 1, size)
    return Pass(size, (gemm,), 1), Pass(2.0 * size, (gemm, gemm), 2)


def _samples(form: Form, given: list[Operand]) -> float:
    """How many samples the local arguments hold: FLOPs are told by elements of the largest of them."""
    elements = largest([0, *(prod(o.shape) for o in given)])
    return elements / form.elements if form.elements else 1.0


def _convolution(key: OpKey, operands: list[Operand]) -> tuple[Pass, Pass]:
    """As the matrix product it is: each position of the result sums over a kernel's window of the input's channels."""
    x, weight = operands[0], operands[1]
    outputs, window = weight.shape[0], prod(weight.shape[1:])
    rows = x.shape[0] * prod(_positions(key, x.shape[2:], weight.shape[2:]))
    groups = argument(key, 6, "groups", 1)
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
    groups = argument(key, 6, "groups", 1)
    batch = groups if isinstance(groups, int) else 1
    rows, inputs, window = x.shape[0] * prod(x.shape[2:]), weight.shape[0] // batch, prod(weight.shape[1:])
    bias = operands[2] if len(operands) > 2 else None
    return _product((batch, rows, window, inputs), x, weight, bias)


def _positions(key: OpKey, image: tuple[int, ...], kernel: tuple[int, ...]) -> list[int]:
    """Shape of the result in space."""
    padding = argument(key, 4, "padding", 0)
    if padding == "same":
        return list(image)
    strides, paddings, dilations = (
        _each(value, len(image)) for value in (argument(key, 3, "stride", 1), padding, argument(key, 5, "dilation", 1))
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


PRODUCTS: dict[str, Formula] = {
    "linear": _linear,
    "opaque": _opaque,
    "addmm": _addmm,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _transposed_convolution for n in (1, 2, 3)},
}
"""Formulas by the operator's name."""
