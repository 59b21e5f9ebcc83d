"""Which operators keep samples apart: entry i of a result depends on entry i of the operands alone, along the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autopar.graph import Argument, Extent, Op, TensorSpec
from autopar.trace.opaque.operator import form_of
from autopar.trace.rewrite.equation import terms_of
from autopar.trace.run import argument, overload

_VIEWS = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten",
}  # fmt: skip
_PERMUTING = {
    "transpose", "permute", "t", "unsqueeze", "expand", "squeeze", "contiguous", "alias", "lift_fresh_copy",
    "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "mH", "adjoint", "view_as_complex", "view_as_real",
    "broadcast_to", "lift", "resolve_conj", "resolve_neg",
}  # fmt: skip
_POINTWISE = {
    "dropout", "to", "clone", "detach", "where", "masked_fill", "type_as", "float", "copy", "zeros_like",
    "ones_like", "full_like", "empty_like", "fill", "zero", "complex", "polar", "real", "imag", "conj",
    "gelu", "silu", "mish", "selu", "relu6",
    "hardtanh", "__and__", "__or__", "__xor__", "hardswish", "log_sigmoid", "floor_divide", "_to_copy",
    "native_dropout", "absolute", "negative", "multiply", "subtract", "divide", "greater", "greater_equal",
    "less", "less_equal", "not_equal", "arctan", "arctan2", "fix",
}  # fmt: skip
_ALONG_DIM = {
    "softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "cat", "stack", "slice", "select", "narrow",
    "split", "split_with_sizes", "chunk", "unbind", "cumsum", "cumprod", "diff", "sort", "argsort", "topk", "argmax",
    "argmin", "amax", "amin", "max", "min", "var", "std", "var_mean", "logsumexp", "flip", "roll", "gather", "norm",
    "linalg_vector_norm", "prod", "any", "all", "glu", "unfold", "index_select", "scatter", "scatter_add",
    "scatter_reduce", "slice_scatter", "index_add", "index_copy", "logcumsumexp", "cummax", "cummin",
    "kthvalue", "std_mean", "count_nonzero", "aminmax", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_fft2",
    "fft_ifft2", "fft_rfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "cosine_similarity", "repeat_interleave",
    "median", "mode", "nansum", "linalg_cross", "fft_irfft2", "fft_irfftn", "index_fill",
}  # fmt: skip
_CONTRACTIONS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm",
}  # fmt: skip
_BATCH_FIRST = {
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d", "max_pool1d", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "group_norm", "instance_norm", "upsample_nearest2d",
    "upsample_bilinear2d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "conv_transpose1d",
    "conv_transpose3d", "max_pool3d", "avg_pool1d", "avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_avg_pool3d", "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bicubic2d", "upsample_trilinear3d", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "max_pool1d_with_indices", "max_pool2d_with_indices", "im2col", "col2im", "grid_sampler",
    "prelu", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "reflection_pad3d", "replication_pad3d",
    "max_pool3d_with_indices",
}  # fmt: skip
_MATRICES = {"inverse", "linalg_inv", "linalg_cholesky", "linalg_matrix_exp", "matrix_exp", "linalg_qr", "linalg_eigh"}


def why_not_apart(op: Op, specs: list[TensorSpec], operands: list[TensorSpec], result: TensorSpec) -> str | None:
    """Why an op mixes samples, or None. `specs` are those of `operands` that have samples, each along one dim."""
    name, at = op.target.split(".")[1], from_end(specs[0])
    if is_pointwise(op.target):
        numbers = any(isinstance(a, Extent) and a.is_batch for a in op.args)
        aligned = all(from_end(s) == from_end(result) for s in specs)
        return None if aligned and not numbers else f"{name} sets samples against each other"
    if name in ("batch_norm", "_native_batch_norm_legit_functional"):
        return "batch norm in training mode uses the statistics of the whole batch" if op.args[5] is True else None
    verdicts = {
        **dict.fromkeys(_VIEWS, lambda: _same_samples(specs[0], result)),
        **dict.fromkeys(_PERMUTING, lambda: True),
        **dict.fromkeys(_CONTRACTIONS, lambda: not _contracts_batch(name, operands)),
        **dict.fromkeys(_BATCH_FIRST, lambda: specs[0].batch_dim == 0),
        **dict.fromkeys(_ALONG_DIM, lambda: not touches_batch(op, specs)),
        **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), lambda: at < -_length(op.args[1])),
        **dict.fromkeys(("pad", "constant_pad_nd"), lambda: not _pads(op, at)),
        **dict.fromkeys(("tril", "triu"), lambda: at < -2),
        "einsum": lambda: _one_label(op, operands, result),
        "one_hot": lambda: specs[0].batch_dim == result.batch_dim,
        **dict.fromkeys(("repeat", "tile"), lambda: from_end(specs[0]) == at == from_end(result)),
        "select_scatter": lambda: not touches_batch(op, [result]) and len({s.batch_dim for s in specs}) == 1,
        "index": lambda: _indexes_apart(op, operands),
        "opaque": lambda: form_of(str(op.args[1])).apart,
        **dict.fromkeys(_MATRICES, lambda: all(from_end(s) < -2 for s in specs)),
        "cdist": lambda: all(from_end(s) < -2 for s in (*specs, result)),
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), lambda: _recurs_apart(op, specs)),
        **dict.fromkeys(
            ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), lambda: all(s.batch_dim == 0 for s in specs)
        ),
        "embedding": lambda: len(specs) == 1 and operands[0].batch_dim is None,
        "scaled_dot_product_attention": lambda: all(from_end(s) < -2 for s in specs),
    }
    if name not in verdicts:
        return f"{op.target} is not known to keep samples apart"
    return None if verdicts[name]() else f"{name} sets samples against each other"


def is_pointwise(target: str) -> bool:
    """Whether an operator computes each element from those in its place."""
    return torch.Tag.pointwise in overload(target).tags or target.split(".")[1] in _POINTWISE


def _indexes_apart(op: Op, operands: list[TensorSpec]) -> bool:
    """Whether every sample picks from its own, or all from what is the same for all of them."""
    source, *indices = operands
    at = source.batch_dim
    if at is None:
        return len({from_end(s) for s in indices if s.batch_dim is not None}) == 1
    given = op.args[1] if isinstance(op.args[1], tuple) else ()
    return (at >= len(given) or given[at] is None) and all(s.batch_dim is None for s in indices)


def _pads(op: Op, dim: int) -> bool:
    """Whether something is added to, or taken from, a dim counted from the end; `pad` lists pairs from there."""
    amounts = op.args[1] if isinstance(op.args[1], tuple) else ()
    return any(amount != 0 for amount in amounts[-2 * dim - 2 : -2 * dim])


def _recurs_apart(op: Op, specs: list[TensorSpec]) -> bool:
    """Whether a recurrent layer goes along another dim than that of the samples, whose states lie behind the layers."""
    return specs[0].batch_dim == (0 if op.args[-1] else 1) and all(s.batch_dim == 1 for s in specs[1:])


def _length(argument: Argument) -> int:
    return len(argument) if isinstance(argument, tuple) else 1


def batch_dims(spec: TensorSpec) -> int:
    return sum(e.is_batch for e in spec.shape)


def from_end(spec: TensorSpec) -> int:
    """The batch dim counted from the end (-1 = last); 0 if there is none."""
    dim = spec.batch_dim
    return 0 if dim is None else dim - len(spec.shape)


def _same_samples(before: TensorSpec, after: TensorSpec) -> bool:
    """Whether a view keeps samples in order: the same dims in front of the batch, or only dims of size 1."""
    front = [s.shape[: s.batch_dim] for s in (before, after)]
    ones = all(e == Extent(0, 1) for dims in front for e in dims)
    return ones or front[0] == front[1]


def _contracts_batch(name: str, operands: list[TensorSpec]) -> bool:
    left, right = operands[-2:] if name in ("addmm", "baddbmm") else operands[:2]
    inner = right.shape[-1] if name == "linear" else right.shape[max(len(right.shape) - 2, 0)]
    return left.shape[-1].is_batch or inner.is_batch


def _one_label(op: Op, operands: list[TensorSpec], result: TensorSpec) -> bool:
    """Whether the batch dims of an einsum's operands and of its result have one label."""
    terms, made = terms_of(str(op.args[0]), [len(s.shape) for s in operands])
    labelled = [*zip(operands, terms, strict=True), (result, made)]
    return len({term[s.batch_dim] for s, term in labelled if s.batch_dim is not None}) == 1


def touches_batch(op: Op, specs: Sequence[TensorSpec]) -> bool:
    """Whether one of the dims the op works along is the batch dim (all dims if it names none)."""
    dims = list(_dims(op))
    if not dims:
        return True
    return any(d % len(s.shape) == s.batch_dim for s in specs for d in dims if s.shape)


def _dims(op: Op) -> Iterator[int]:
    for name in ("dim", "dims", "start_dim"):
        given = argument(op, name, None)
        if isinstance(given, int):
            yield given
        elif isinstance(given, tuple):
            yield from (d for d in given if isinstance(d, int))
