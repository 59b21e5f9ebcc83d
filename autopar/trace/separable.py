"""Whether the batch may be split in time: do samples meet nowhere but in one sum or mean at the loss?

A conservative walk over the operators. Each value is free of the batch, holds one entry a sample, is a reduction over
the samples, or mixes samples in another way; an operator that is not known to keep samples apart mixes them, and what
is not exactly a sum, a mean or a mean over the targets that count mixes them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.graph import Extent, LayerClass, LossForm, Op, OpGraph, Ref, TensorSpec
from autopar.trace.apart import batch_dims, from_end, touches_batch, why_not_apart
from autopar.trace.opaque.operator import OPAQUE
from autopar.trace.randomness import draws, draws_whole
from autopar.trace.run import argument


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
    if any(batch_dims(s) > 1 or any(e.is_batch and e.fixed for e in s.shape) for s in (*specs, result)):
        return f"{name} pairs or joins samples"
    if name in _COUNTED:
        return _counted(op, name, dict(zip(op.operands, given, strict=True)), specs, values)
    if name in _ELEMENTWISE:
        reduction = argument(op, "reduction", _MEAN)
        if len(set(map(from_end, specs))) > 1:
            return f"{name} sets samples against each other"
        return None if reduction == _NONE else LossForm("mean" if reduction == _MEAN else "sum")
    if name in ("sum", "mean"):
        return LossForm(name) if touches_batch(op, specs[:1]) else None
    if result.batch_dim is None:
        return f"{name} joins the samples"
    ruled = _RULED.get(op.target) or _RULED.get(op.target.rpartition(".")[0])
    if ruled is not None:
        return None if ruled(op, values) else f"{name} sets samples against each other, by the rule registered for it"
    return why_not_apart(op, specs, [values[n] for n in op.operands], result)


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
