"""`trace`: a module and example inputs become an `OpGraph`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autopar.errors import ConfigError, TraceError
from autopar.graph import OpGraph, TensorSpec
from autopar.trace import blocks as blocks_
from autopar.trace import marker
from autopar.trace.attention import without_fused_dropout
from autopar.trace.canonical import explicit_sizes, functional, without_dead_code, without_no_ops
from autopar.trace.convert import Converter, NotLinearError, spec_of
from autopar.trace.failure import is_own_bug, reason_of, trace_error
from autopar.trace.flat import BUFFER, INPUT, PARAM, Flat
from autopar.trace.inputs import BoundInputs, ExampleInputs, bind
from autopar.trace.layers import cut_into_layers
from autopar.trace.loss import LossFn, Root
from autopar.trace.masks import fold_masks
from autopar.trace.randomness import refuse_random
from autopar.trace.saved import annotate
from autopar.trace.separable import judge
from autopar.trace.shadow import shadow


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
    last of `outputs` is then the sum of its floating outputs, which stands in for a loss in planning.

    Raises TraceError with the module, line and reason when the model can't be traced; ConfigError for bad arguments.
    """
    dtype = _dtype(compute_dtype)
    inputs = bind(model, example_inputs)
    captured = _first_that_works(model, inputs, dtype, loss_fn)
    flat = _flat(inputs, captured)
    flat = without_fused_dropout(without_dead_code(fold_masks(explicit_sizes(functional(flat)))))
    flat = without_dead_code(without_no_ops(annotate(flat)))
    refuse_random(flat)
    return replace(judge(cut_into_layers(flat)), constants=inputs.constants)


def _dtype(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not isinstance(found, torch.dtype):
        raise ConfigError(f"compute_dtype {name!r} is no torch dtype. Use float32, bfloat16, float16 or float64.")
    return found


@dataclass(frozen=True)
class _Attempt:
    """How to export: with the batch symbolic or as given, equal blocks once or each."""

    symbolic: bool
    grouped: bool


@dataclass(frozen=True)
class _Captured:
    root: Root
    converter: Converter
    names: dict[str, str]
    params: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    assumptions: tuple[str, ...] = ()


def _first_that_works(
    model: nn.Module, inputs: BoundInputs, dtype: torch.dtype | None, loss_fn: LossFn | None
) -> _Captured:
    attempts = [_Attempt(True, True), _Attempt(True, False), _Attempt(False, True), _Attempt(False, False)]
    if inputs.batch is None:
        attempts = attempts[2:]
    errors: dict[_Attempt, Exception] = {}
    for attempt in attempts:
        try:
            captured = _capture(model, inputs, dtype, loss_fn, attempt)
        except (TraceError, ConfigError):
            raise
        except Exception as failed:  # torch.export raises many kinds
            if is_own_bug(failed) and not isinstance(failed, NotLinearError):
                raise
            errors[attempt] = failed
            continue
        return replace(captured, assumptions=(*captured.assumptions, *_fallbacks(inputs, attempt, errors)))
    first = errors[attempts[0]]  # it says most
    raise trace_error(model, first) from first


def _fallbacks(inputs: BoundInputs, used: _Attempt, errors: dict[_Attempt, Exception]) -> Iterator[str]:
    """What was given up because other attempts failed."""
    if not used.symbolic and inputs.batch is not None:
        reason = reason_of(next(iter(errors.values())))
        yield f"the batch could not be symbolic ({reason}): traced at batch {inputs.batch} only"
    if not used.grouped:
        reason = reason_of(errors[_Attempt(used.symbolic, True)])
        yield f"equal blocks could not be traced once for all ({reason}): each is traced"


def _capture(
    model: nn.Module, inputs: BoundInputs, dtype: torch.dtype | None, loss_fn: LossFn | None, attempt: _Attempt
) -> _Captured:
    root = Root(shadow(model, dtype), inputs, loss_fn)
    # A symbolic size must not be 0 or 1 when it is traced: torch takes those for constants.
    batch = max(inputs.batch or 0, 2) if attempt.symbolic else inputs.batch
    tensors = inputs.on_meta(batch, dtype)
    names = _canonical_names(root.model)
    params = {n: replace(spec_of(p), requires_grad=p.requires_grad) for n, p in root.model.named_parameters()}
    buffers = {n: spec_of(b) for n, b in root.model.named_buffers()}
    blocks, note = blocks_.find(root, inputs.on_meta(batch, dtype)) if attempt.grouped else ([], "")
    try:
        blocks_.install(root, blocks)
        program = _export(root, tensors, inputs, attempt.symbolic)
        converter = Converter(program, inputs.names, names, blocks)
        return _Captured(root, converter, names, params, buffers, (note,) if note else ())
    finally:
        for block in blocks:
            marker.forget(block.kind)


def _export(
    root: Root, tensors: tuple[Tensor, ...], inputs: BoundInputs, symbolic: bool
) -> torch.export.ExportedProgram:
    dim = torch.export.Dim("batch", min=1)
    shapes = (tuple({0: dim} if shares and symbolic else {} for shares in inputs.batched),)
    return torch.export.export(root, tensors, dynamic_shapes=shapes if symbolic else None, strict=False)


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for group in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in group:
            names[name] = first.setdefault(id(tensor), name)
    return names


def _flat(inputs: BoundInputs, captured: _Captured) -> Flat:
    converter, outcome = captured.converter, captured.root.outcome
    assumptions = captured.assumptions
    if outcome.stands_in:
        assumptions += (
            "the model returns no scalar and no loss_fn was given: planned on the sum of its float outputs",
        )
    own = {PARAM + n: s for n, s in captured.params.items()} | {BUFFER + n: s for n, s in captured.buffers.items()}
    return Flat(
        items=tuple(converter.items),
        values=converter.values | own,
        inputs=tuple(INPUT + n for n in inputs.names),
        params=captured.params,
        buffers=captured.buffers,
        aliases={name: first for name, first in captured.names.items() if name != first},
        outputs=tuple(dict.fromkeys(converter.outputs)),
        loss=None if outcome.loss_at is None else converter.outputs[outcome.loss_at],
        assumptions=assumptions,
    )
