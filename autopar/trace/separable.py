"""Whether the batch may be split in time: do samples meet nowhere but in one sum or mean at the loss?

A conservative walk over the operators. Each value is free of the batch, holds one entry a sample, is a reduction over
the samples, or mixes samples in another way; an operator that is not known to keep samples apart mixes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.graph import Argument, Extent, LayerClass, Op, OpGraph, TensorSpec
from autopar.trace.run import overload


@dataclass(frozen=True)
class _Free:
    """Does not depend on the batch."""


@dataclass(frozen=True)
class _Sample:
    """One entry a sample along the value's batch dim."""


@dataclass(frozen=True)
class _Reduced:
    """A sum, mean or count-weighted mean (`ce`) over the samples."""

    kind: str


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
}  # fmt: skip
_POINTWISE = {
    "dropout", "to", "clone", "detach", "where", "masked_fill", "type_as", "float", "copy", "one_hot", "zeros_like",
    "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "gelu", "silu", "mish", "selu", "relu6",
    "hardtanh",
}  # fmt: skip
_ALONG_DIM = {
    "softmax", "log_softmax", "_softmax", "_log_softmax", "cat", "stack", "slice", "select", "narrow", "split",
    "split_with_sizes", "chunk", "unbind", "cumsum", "cumprod", "diff", "sort", "argsort", "topk", "argmax", "argmin",
    "amax", "amin", "max", "min", "var", "std", "var_mean", "logsumexp", "flip", "roll", "gather", "norm",
    "linalg_vector_norm", "prod", "any", "all", "glu", "unfold", "index_select", "scatter", "scatter_add",
}  # fmt: skip
_CONTRACTIONS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm",
}  # fmt: skip
_BATCH_FIRST = {
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d", "max_pool1d", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "group_norm", "instance_norm", "upsample_nearest2d",
    "upsample_bilinear2d", "pixel_shuffle",
}  # fmt: skip
_LOSSES = {
    "cross_entropy_loss": "ce", "nll_loss": "ce", "nll_loss_nd": "ce", "mse_loss": "mean", "l1_loss": "mean",
    "smooth_l1_loss": "mean", "huber_loss": "mean", "binary_cross_entropy": "mean",
    "binary_cross_entropy_with_logits": "mean", "kl_div": "mean",
}  # fmt: skip
_LINEAR = {
    "mul", "div", "neg", "view", "reshape", "to", "clone", "squeeze", "unsqueeze", "add", "sub", "sum", "mean",
    "alias",
}  # fmt: skip


def judge(graph: OpGraph) -> OpGraph:
    """`graph` with `separable` and `why_not_separable` filled in."""
    target = graph.loss or (graph.outputs[-1] if graph.outputs else "")
    states: dict[str, _State] = {
        n: _Sample() if graph.values[n].batch_dim is not None else _Free() for n in graph.inputs
    }
    memo: dict[tuple[int, tuple[_State, ...]], tuple[_State, ...]] = {}
    for layer in graph.layers:
        key = (layer.class_index, tuple(states[n] for n in layer.inputs))
        if key not in memo:
            memo[key] = _through(graph.classes[layer.class_index], key[1])
        states |= dict(zip(layer.outputs, memo[key], strict=True))
    why = _complaint(states.get(target, _Free()))
    return replace(graph, separable=not why, why_not_separable=why)


def _complaint(state: _State) -> str:
    if isinstance(state, _Mixed):
        return state.why
    return "" if isinstance(state, _Reduced) else "the loss is no sum or mean over the samples of a symbolic batch"


def _through(layer: LayerClass, inputs: tuple[_State, ...]) -> tuple[_State, ...]:
    states: dict[str, _State] = {name: _Free() for name in (*layer.params, *layer.buffers)}
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
    reduced = [s for s in given if isinstance(s, _Reduced)]
    if reduced:
        return _after_reduction(op, given, reduced)
    if not any(isinstance(s, _Sample) for s in given):
        return _created(op, result)
    why = _mixes(op, given, values, result)
    if why is None:
        return _Sample()
    return why if isinstance(why, _Reduced) else _Mixed(f"{op.module or op.name}: {why}")


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _created(op: Op, result: TensorSpec) -> _State:
    if result.batch_dim is None:
        return _Free()
    if _name(op) in ("arange", "linspace", "eye"):
        return _Mixed(f"{op.module or op.name}: {_name(op)} numbers the samples of the batch")
    return _Sample()


def _after_reduction(op: Op, given: list[_State], reduced: list[_Reduced]) -> _State:
    """Only linear steps, and sums of reductions of one kind, keep a reduction a reduction."""
    name = _name(op)
    numbers = any(isinstance(a, Extent) and a.is_batch for a in op.args)
    same = len(set(reduced)) == 1
    alone = len(given) == 1 or (name in ("mul", "div") and len(reduced) == 1 and isinstance(given[0], _Reduced))
    if name in _LINEAR and same and not numbers and not any(isinstance(s, _Sample) for s in given):
        added = name in ("add", "sub") and (len(reduced) == len(given) > 1 and reduced[0].kind != "ce")
        if added or (alone and (name not in ("add", "sub") or reduced[0].kind != "sum")):
            return reduced[0]
    return _Mixed(f"{op.module or op.name}: {name} uses a value reduced over the batch")


def _mixes(op: Op, given: list[_State], values: dict[str, TensorSpec], result: TensorSpec) -> str | _Reduced | None:
    """None if samples stay apart, a reduction if they meet in a sum or mean, else why they meet."""
    name = _name(op)
    specs = [values[n] for n, s in zip(op.operands, given, strict=True) if isinstance(s, _Sample)]
    if any(_batch_dims(s) > 1 or any(e.is_batch and e.fixed for e in s.shape) for s in (*specs, result)):
        return f"{name} pairs or joins samples"
    if name in _LOSSES:
        return _loss(op, name)
    if name in ("sum", "mean"):
        return _sum_or_mean(op, name, specs[0])
    if result.batch_dim is None:
        return f"{name} joins the samples"
    return _apart(op, name, specs, [values[n] for n in op.operands], result)


def _apart(op: Op, name: str, specs: list[TensorSpec], operands: list[TensorSpec], result: TensorSpec) -> str | None:
    """Why an op whose operands and result each have one batch dim mixes samples, or None."""
    at = _from_end(specs[0])
    if torch.Tag.pointwise in overload(op.target).tags or name in _POINTWISE:
        numbers = any(isinstance(a, Extent) and a.is_batch for a in op.args) and not name.startswith("new_")
        aligned = all(_from_end(s) == _from_end(result) for s in specs)
        return None if aligned and not numbers else f"{name} sets samples against each other"
    if name == "batch_norm":
        return "batch norm in training mode uses the statistics of the whole batch" if op.args[5] is True else None
    verdicts = {
        **dict.fromkeys(_VIEWS, lambda: _same_samples(specs[0], result)),
        **dict.fromkeys(_PERMUTING, lambda: True),
        **dict.fromkeys(_CONTRACTIONS, lambda: not _contracts_batch(name, operands)),
        **dict.fromkeys(_BATCH_FIRST, lambda: specs[0].batch_dim == 0),
        **dict.fromkeys(_ALONG_DIM, lambda: not _touches_batch(op, specs)),
        **dict.fromkeys(("layer_norm", "rms_norm"), lambda: at < -_length(op.args[1])),
        **dict.fromkeys(("pad", "constant_pad_nd"), lambda: at < -_length(op.args[1]) // 2),
        **dict.fromkeys(("tril", "triu"), lambda: at < -2),
        "embedding": lambda: len(specs) == 1 and operands[0].batch_dim is None,
        "scaled_dot_product_attention": lambda: all(_from_end(s) < -2 for s in specs),
    }
    if name not in verdicts:
        return f"{op.target} is not known to keep samples apart"
    return None if verdicts[name]() else f"{name} sets samples against each other"


def _length(argument: Argument) -> int:
    return len(argument) if isinstance(argument, tuple) else 1


def _loss(op: Op, name: str) -> _Reduced | None:
    reduction = _argument(op, "reduction", 1)
    if reduction == 0:
        return None
    return _Reduced(_LOSSES[name] if reduction == 1 else "sum")


def _sum_or_mean(op: Op, name: str, spec: TensorSpec) -> _Reduced | None:
    return _Reduced(name) if _touches_batch(op, [spec]) else None


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
    dims = [s.shape[s.batch_dim] for s in (before, after) if s.batch_dim is not None]
    return ones or (front[0] == front[1] and dims[0] == dims[1])


def _contracts_batch(name: str, operands: list[TensorSpec]) -> bool:
    left, right = operands[-2:] if name in ("addmm", "baddbmm") else operands[:2]
    inner = right.shape[-1] if name == "linear" else right.shape[max(len(right.shape) - 2, 0)]
    return left.shape[-1].is_batch or inner.is_batch


def _touches_batch(op: Op, specs: list[TensorSpec]) -> bool:
    """Whether one of the dims the op works along is the batch dim (all dims if it names none)."""
    dims = list(_dims(op))
    if not dims:
        return True
    return any(d % len(s.shape) == s.batch_dim for s in specs for d in dims if s.shape)


def _dims(op: Op) -> Iterator[int]:
    for name in ("dim", "dims", "start_dim"):
        given = _argument(op, name, None)
        if isinstance(given, int):
            yield given
        elif isinstance(given, tuple):
            yield from (d for d in given if isinstance(d, int))


def _argument(op: Op, name: str, default: Argument) -> Argument:
    """The argument called `name` in the operator's schema, as given or by default."""
    for position, declared in enumerate(overload(op.target)._schema.arguments):
        if declared.name == name:
            given: Any = (
                op.args[position] if position < len(op.args) else dict(op.kwargs).get(name, declared.default_value)
            )
            return tuple(given) if isinstance(given, list) else given
    return default
