"""`trace`: a module and example inputs become an `OpGraph`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from autopar.errors import ConfigError, TraceError
from autopar.graph import Op, OpGraph
from autopar.trace.exported import Attempt, Exporter
from autopar.trace.failure import depends_on_data, forward_error, is_own_bug, module_of, reason_of, trace_error
from autopar.trace.flat import Flat
from autopar.trace.inputs import ExampleInputs, bind
from autopar.trace.known.masks import fold_masks
from autopar.trace.layers.chain import cut_into_layers
from autopar.trace.loss import LossFn
from autopar.trace.opaque.operator import OPAQUE, form_of
from autopar.trace.opaque.standins import StandIns
from autopar.trace.rewrite.attention import without_fused_dropout
from autopar.trace.rewrite.canonical import explicit_sizes, functional, without_dead_code, without_no_ops
from autopar.trace.rewrite.unmerged import unmerged_rows
from autopar.trace.rewrite.written import without_out, written_as_reals
from autopar.trace.saved import annotate
from autopar.trace.separable import judge
from autopar.trace.sizes import OperatorError


def trace(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    compute_dtype: str | None = None,
    loss_fn: LossFn | None = None,
) -> OpGraph:
    """Trace `model` on meta copies of itself and of `example_inputs`; neither is changed, no weight is allocated.

    `compute_dtype` (a torch dtype's name) is that of floating parameters and inputs in the graph; buffers keep theirs.
    Parameters are listed with that dtype. The batch is symbolic where the model allows it; where it does not, the graph
    is of the size given and `assumptions` says so. A model without a scalar output or `loss_fn` has `loss` None; the
    last of `outputs` is then the sum of its floating outputs, which stands in for a loss in planning. A submodule that
    can't be taken apart, as what it does depends on values, becomes one operator.

    Raises TraceError with the module, line and reason when the model can't be traced; ConfigError for bad arguments.
    """
    dtype = _dtype(compute_dtype)
    inputs = bind(model, example_inputs)
    compute = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    stand_ins = StandIns(model, str(compute).removeprefix("torch."))
    exporter = Exporter(model, inputs, dtype, loss_fn, stand_ins)
    try:
        graph = _traced(exporter)
    except TraceError as error:
        raise _plainly(exporter, error) from error
    return replace(_kept_apart(exporter, graph), constants=inputs.constants)


def _plainly(exporter: Exporter, error: TraceError) -> TraceError:
    """What to say of a model that can't be traced: where its forward fails by itself in the same way, that."""
    failed = exporter.error_of_forward()
    kind = type(failed).__name__
    if failed is None or depends_on_data(failed) or kind == "NotImplementedError" or f"({kind}: " not in str(error):
        return error  # without data some models can't be run that otherwise can
    return forward_error(exporter.model, failed)


def _traced(exporter: Exporter) -> OpGraph:
    """The graph, with submodules that can't be traced as one operator each. Raises TraceError with the first reason."""
    reasons: list[str] = []
    while True:
        try:
            return _graph(_first_that_works(exporter))
        except (_InTheWay, OperatorError) as found:
            path = found.path
            reasons.append(str(found))
        try:
            exporter.stand_ins.add(path, reasons[-1])
        except TraceError as error:
            raise TraceError(" As one operator: ".join(dict.fromkeys((reasons[0], reasons[-1])))) from error


def _kept_apart(exporter: Exporter, graph: OpGraph) -> OpGraph:
    """A graph in which submodules that keep samples apart, although their operators don't, are one operator each.

    Experts that sort the tokens of all samples, and put them back in order, are such.
    """
    stand_ins = exporter.stand_ins
    tried: set[str] = set()
    while (path := _mixing_module(exporter.model, graph)) and path not in tried:
        tried.add(path)
        before = dict(stand_ins.paths)
        try:
            stand_ins.add(path, f"{graph.why_not_separable}, but not the module as a whole")
            found = _graph(_first_that_works(exporter))
        except (_InTheWay, TraceError):
            stand_ins.paths = before
            break
        if not all(form_of(str(op.args[1])).apart for op in _opaque_ops(found) if op.module == path):
            stand_ins.paths = before
            break
        graph = found
    return graph


def _mixing_module(model: nn.Module, graph: OpGraph) -> str:
    """Path of the submodule in which samples meet, if its parameters are its own; '' if there is none."""
    path = "" if graph.separable else graph.why_not_separable.partition(":")[0]
    module = dict(model.named_modules()).get(path)
    if module is None or any(next(child.parameters(), None) is not None for child in module.children()):
        return ""
    changes = {name.rpartition(".")[0] for name in graph.updates}
    return "" if path in changes else path


def _opaque_ops(graph: OpGraph) -> list[Op]:
    return [op for layer in graph.classes for op in layer.ops if op.target == OPAQUE]


def _graph(flat: Flat) -> OpGraph:
    flat = explicit_sizes(written_as_reals(functional(without_out(flat))))
    flat = without_fused_dropout(without_dead_code(fold_masks(unmerged_rows(flat))))
    flat = without_dead_code(without_no_ops(annotate(flat)))
    return judge(cut_into_layers(flat))


def _dtype(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not isinstance(found, torch.dtype):
        raise ConfigError(f"compute_dtype {name!r} is no torch dtype. Use float32, bfloat16, float16 or float64.")
    return found


class _InTheWay(Exception):
    """A submodule that can't be traced: it is to stand as one operator."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


def _first_that_works(exporter: Exporter) -> Flat:
    """The export by the first attempt that succeeds.

    Raises _InTheWay where a submodule is why none does, TraceError where it is the model.
    """
    attempts = [Attempt(batch, grouped) for batch in ("symbol", "two sizes", "given") for grouped in (True, False)]
    if exporter.inputs.batch is None:
        attempts = attempts[4:]
    errors: dict[Attempt, Exception] = {}
    for attempt in attempts:
        try:
            flat = exporter.export(attempt)
        except (TraceError, ConfigError):
            raise
        except Exception as failed:  # torch.export raises many kinds
            if is_own_bug(failed):
                raise
            errors[attempt] = failed
            if depends_on_data(failed):
                break
            continue
        return replace(flat, assumptions=(*flat.assumptions, *_fallbacks(exporter, attempt, errors)))
    tried = [e for e in errors.values() if depends_on_data(e)] or list(errors.values())
    for error in (tried[0], tried[-1]):  # without a submodule to name the last says most: it was given most
        if path := module_of(error):
            raise _InTheWay(path, str(trace_error(exporter.model, error)))  # which is raised if it can't stand
    raise trace_error(exporter.model, tried[-1]) from tried[-1]


def _fallbacks(exporter: Exporter, used: Attempt, errors: dict[Attempt, Exception]) -> Iterator[str]:
    """What was given up because other attempts failed."""
    if used.batch == "given" and exporter.inputs.batch is not None:
        reason = reason_of(next(iter(errors.values())))
        yield f"the batch could not be symbolic ({reason}): traced at batch {exporter.inputs.batch} only"
    if not used.grouped:
        reason = reason_of(errors[Attempt(used.batch, True)])
        yield f"equal blocks could not be traced once for all ({reason}): each is traced"
    yield from exporter.stand_ins.notes()
