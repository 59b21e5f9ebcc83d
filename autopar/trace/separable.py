"""Whether the batch may be split in time: do samples meet nowhere but in one sum or mean at the loss?

A conservative walk over the operators. Each value is free of the batch, holds one entry a sample, is a reduction over
the samples, or mixes samples in another way; an operator that is not known to keep samples apart mixes them, and what
is not exactly a sum, a mean or a mean over the targets that count mixes them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from autopar.graph import Argument, Extent, LayerClass, LossForm, Op, OpGraph, Ref, TensorSpec
from autopar.trace.opaque.operator import OPAQUE, form_of
from autopar.trace.randomness import draws, draws_whole
from autopar.trace.rewrite.equation import terms_of
from autopar.trace.run import argument, overload


@dataclass(frozen=True)
class _Free:
    """Does not depend on the batch; `given` if it follows from inputs and constants alone."""

    given: bool = True


@dataclass(frozen=True)
class _Sample:
    """One entry a sample along the value's batch dim; `given` if it follows from inputs and constants alone."""

    given: bool = True


@dataclass(frozen=True)
class _Reduced:
    """A reduction over the samples; the layer of a `count` is filled in behind the layer."""

    form: LossForm


@dataclass(frozen=True)
class _Mixed:
    """Samples meet; `why` says where."""

    why: str


_State = _Free | _Sample | _Reduced | _Mixed

_VIEWS = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten",
}  # fmt: skip
_PERMUTING = {
    "transpose", "permute", "t", "unsqueeze", "expand", "squeeze", "contiguous", "alias", "lift_fresh_copy",
    "movedim", "swapaxes", "swapdims", "mT", "view_as_complex", "view_as_real",
}  # fmt: skip
_POINTWISE = {
    "dropout", "to", "clone", "detach", "where", "masked_fill", "type_as", "float", "copy", "zeros_like",
    "ones_like", "full_like", "empty_like", "fill", "zero", "complex", "polar", "real", "imag", "conj",
    "gelu", "silu", "mish", "selu", "relu6",
    "hardtanh", "__and__", "__or__", "__xor__",
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
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
}  # fmt: skip
_MATRICES = {"inverse", "linalg_inv", "linalg_cholesky", "linalg_matrix_exp", "matrix_exp", "linalg_qr", "linalg_eigh"}
_COUNTED = {
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d",
}  # fmt: skip
_ELEMENTWISE = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
}  # fmt: skip
_NONE, _MEAN = 0, 1
"""Codes of the `reduction` argument in ATen; 2 is the sum."""
_LINEAR = {
    "mul", "div", "neg", "view", "reshape", "to", "clone", "squeeze", "unsqueeze", "add", "sub", "sum", "mean",
    "alias",
}  # fmt: skip


Ruled: TypeAlias = Callable[[Op, Mapping[str, TensorSpec]], bool]
"""Whether an operator keeps samples apart, which its results have as many of as its operands."""
_RULED: dict[str, Ruled] = {}


def judge_by(target: str, ruled: Ruled) -> None:
    """Let `ruled` say for an operator (`mylib.op` or `mylib.op.overload`) whether it keeps samples apart."""
    _RULED[target] = ruled


def judge(graph: OpGraph) -> OpGraph:
    """`graph` with `separable`, `loss_form` and `why_not_separable` filled in."""
    target = graph.loss or (graph.outputs[-1] if graph.outputs else "")
    states: dict[str, _State] = {
        n: _Sample() if graph.values[n].batch_dim is not None else _Free() for n in graph.inputs
    }
    memo: dict[tuple[int, tuple[_State, ...]], tuple[_State, ...]] = {}
    for i, layer in enumerate(graph.layers):
        key = (layer.class_index, tuple(states[n] for n in layer.inputs))
        if key not in memo:
            memo[key] = _through(graph.classes[layer.class_index], key[1])
        states |= dict(zip(layer.outputs, (_placed(s, i) for s in memo[key]), strict=True))
    found = states.get(target, _Free())
    changes = _changes_buffers(graph)
    if isinstance(found, _Reduced):
        return replace(graph, separable=not changes, loss_form=found.form, why_not_separable=changes)
    why = found.why if isinstance(found, _Mixed) else "the loss is no sum or mean over the samples of a symbolic batch"
    return replace(graph, separable=False, why_not_separable=why)


def _placed(state: _State, layer: int) -> _State:
    """The state behind layer number `layer`."""
    if isinstance(state, _Reduced) and state.form.kind == "count" and state.form.layer < 0:
        return _Reduced(replace(state.form, layer=layer))
    return state


def _changes_buffers(graph: OpGraph) -> str:
    names = sorted(graph.updates)
    return f"forward changes buffers ({', '.join(names[:3])}): each microbatch would change them again" if names else ""


def _through(layer: LayerClass, inputs: tuple[_State, ...]) -> tuple[_State, ...]:
    states: dict[str, _State] = {name: _Free(given=False) for name in (*layer.params, *layer.buffers)}
    states |= dict(zip(layer.inputs, inputs, strict=True))
    for op in layer.ops:
        given = [states[n] for n in op.operands]
        for result in op.results:
            states[result] = _after(op, given, layer.values, layer.values[result])
    return tuple(states[n] for n in layer.outputs)


def _after(op: Op, given: list[_State], values: dict[str, TensorSpec], result: TensorSpec) -> _State:
    """State of a result of `op` from those of its operands."""
    mixed = next((s for s in given if isinstance(s, _Mixed)), None)
    if mixed:
        return mixed
    if result.batch_dim is not None and draws_whole(op):
        return _mixing(op, f"{_name(op)} draws the random numbers of all samples at once")
    if any(isinstance(s, _Reduced) for s in given):
        form = _after_reduction(op, given, result)
        if form:
            return _Reduced(form)
        if len({s.form for s in given if isinstance(s, _Reduced)}) > 1:
            why = (
                "joins losses that are sums, means or counted over different targets: parts would weigh each otherwise"
            )
            return _mixing(op, f"{_name(op)} {why}")
        return _mixing(op, f"{_name(op)} uses a value reduced over the batch")
    certain = all(s.given for s in given if isinstance(s, (_Free, _Sample))) and op.target != OPAQUE and not draws(op)
    if not any(isinstance(s, _Sample) for s in given):
        return _created(op, result, certain)
    found = _mixes(op, given, values, result)
    if found is None:
        return _Sample(certain)
    return _Reduced(found) if isinstance(found, LossForm) else _mixing(op, found)


def _mixing(op: Op, why: str) -> _Mixed:
    return _Mixed(f"{op.module or op.name}: {why}")


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _created(op: Op, result: TensorSpec, certain: bool) -> _State:
    if result.batch_dim is None:
        return _Free(certain)
    if _name(op) in ("arange", "linspace", "eye"):
        return _mixing(op, f"{_name(op)} numbers the samples of the batch")
    return _Sample(certain)


def _after_reduction(op: Op, given: list[_State], result: TensorSpec) -> LossForm | None:
    """The form after a step that is linear in reductions of one form; None after any other."""
    name, forms = _name(op), [s.form for s in given if isinstance(s, _Reduced)]
    linear = name in _LINEAR and not op.target.endswith("_mode") and "float" in result.dtype
    if not linear or len(set(forms)) > 1 or any(isinstance(s, _Sample) for s in given):
        return None
    form, adds = forms[0], name in ("add", "sub")
    sizes = [a for a in op.args if isinstance(a, Extent) and a.is_batch]
    if sizes:  # the sum over a number of samples is the mean
        mean = name == "div" and form.kind == "sum" and len(given) == 1 and not sizes[0].fixed
        return LossForm("mean") if mean else None
    if len(given) == 1:
        return None if adds and form.kind == "sum" else form
    if adds:  # what no sample has part in counts once in a mean, in a sum with every microbatch again
        return form if len(forms) == len(given) or form.kind != "sum" else None
    return form if name in ("mul", "div") and len(forms) == 1 and isinstance(given[0], _Reduced) else None


def _mixes(op: Op, given: list[_State], values: dict[str, TensorSpec], result: TensorSpec) -> str | LossForm | None:
    """None if samples stay apart, a form if they meet in a reduction, else why they meet."""
    name = _name(op)
    specs = [values[n] for n, s in zip(op.operands, given, strict=True) if isinstance(s, _Sample)]
    if any(_batch_dims(s) > 1 or any(e.is_batch and e.fixed for e in s.shape) for s in (*specs, result)):
        return f"{name} pairs or joins samples"
    if name in _COUNTED:
        return _counted(op, name, dict(zip(op.operands, given, strict=True)), specs, values)
    if name in _ELEMENTWISE:
        reduction = argument(op, "reduction", _MEAN)
        if len(set(map(_from_end, specs))) > 1:
            return f"{name} sets samples against each other"
        return None if reduction == _NONE else LossForm("mean" if reduction == _MEAN else "sum")
    if name in ("sum", "mean"):
        return LossForm(name) if _touches_batch(op, specs[:1]) else None
    if result.batch_dim is None:
        return f"{name} joins the samples"
    ruled = _RULED.get(op.target) or _RULED.get(op.target.rpartition(".")[0])
    if ruled is not None:
        return None if ruled(op, values) else f"{name} sets samples against each other, by the rule registered for it"
    return _apart(op, name, specs, [values[n] for n in op.operands], result)


def _counted(
    op: Op, name: str, given: dict[str, _State], specs: list[TensorSpec], values: dict[str, TensorSpec]
) -> str | LossForm | None:
    """A loss of classes: its mean is over the targets that are not ignored."""
    reduction, target, ignored = argument(op, "reduction", _MEAN), op.args[1], argument(op, "ignore_index", -100)
    if any(s.batch_dim for s in specs) or not isinstance(target, Ref) or not isinstance(ignored, int):
        return f"{name} sets samples against each other"
    if reduction != _MEAN:
        return None if reduction == _NONE else LossForm("sum")
    if "float" in values[target.name].dtype:  # class probabilities: none is ignored
        return LossForm("mean")
    if argument(op, "weight", None) is not None:
        return f"{name} is a mean over targets weighted by class"
    state = given[target.name]
    if not isinstance(state, _Sample) or not state.given:
        return f"{name} is a mean over targets that do not follow from the inputs alone"
    return LossForm("count", -1, op.name, target.name, ignored)


def _apart(op: Op, name: str, specs: list[TensorSpec], operands: list[TensorSpec], result: TensorSpec) -> str | None:
    """Why an op whose operands and result each have one batch dim mixes samples, or None."""
    at = _from_end(specs[0])
    if torch.Tag.pointwise in overload(op.target).tags or name in _POINTWISE:
        numbers = any(isinstance(a, Extent) and a.is_batch for a in op.args)
        aligned = all(_from_end(s) == _from_end(result) for s in specs)
        return None if aligned and not numbers else f"{name} sets samples against each other"
    if name in ("batch_norm", "_native_batch_norm_legit_functional"):
        return "batch norm in training mode uses the statistics of the whole batch" if op.args[5] is True else None
    verdicts = {
        **dict.fromkeys(_VIEWS, lambda: _same_samples(specs[0], result)),
        **dict.fromkeys(_PERMUTING, lambda: True),
        **dict.fromkeys(_CONTRACTIONS, lambda: not _contracts_batch(name, operands)),
        **dict.fromkeys(_BATCH_FIRST, lambda: specs[0].batch_dim == 0),
        **dict.fromkeys(_ALONG_DIM, lambda: not _touches_batch(op, specs)),
        **dict.fromkeys(("layer_norm", "rms_norm"), lambda: at < -_length(op.args[1])),
        **dict.fromkeys(("pad", "constant_pad_nd"), lambda: not _pads(op, at)),
        **dict.fromkeys(("tril", "triu"), lambda: at < -2),
        "einsum": lambda: _one_label(op, operands, result),
        "one_hot": lambda: specs[0].batch_dim == result.batch_dim,
        **dict.fromkeys(("repeat", "tile"), lambda: _from_end(specs[0]) == at == _from_end(result)),
        "select_scatter": lambda: not _touches_batch(op, [result]) and len({s.batch_dim for s in specs}) == 1,
        "index": lambda: _indexes_apart(op, operands),
        "opaque": lambda: form_of(str(op.args[1])).apart,
        **dict.fromkeys(_MATRICES, lambda: all(_from_end(s) < -2 for s in specs)),
        "cdist": lambda: all(_from_end(s) < -2 for s in (*specs, result)),
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), lambda: _recurs_apart(op, specs)),
        **dict.fromkeys(
            ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), lambda: all(s.batch_dim == 0 for s in specs)
        ),
        "embedding": lambda: len(specs) == 1 and operands[0].batch_dim is None,
        "scaled_dot_product_attention": lambda: all(_from_end(s) < -2 for s in specs),
    }
    if name not in verdicts:
        return f"{op.target} is not known to keep samples apart"
    return None if verdicts[name]() else f"{name} sets samples against each other"


def _indexes_apart(op: Op, operands: list[TensorSpec]) -> bool:
    """Whether every sample picks from its own, or all from what is the same for all of them."""
    source, *indices = operands
    at = source.batch_dim
    if at is None:
        return len({_from_end(s) for s in indices if s.batch_dim is not None}) == 1
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


def _batch_dims(spec: TensorSpec) -> int:
    return sum(e.is_batch for e in spec.shape)


def _from_end(spec: TensorSpec) -> int:
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


def _touches_batch(op: Op, specs: list[TensorSpec]) -> bool:
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
