"""One export of a model: its operators as a `Flat` list, with the batch symbolic, blended from two, or as given."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from autopar.graph import TensorSpec
from autopar.trace import marker
from autopar.trace.convert import Converter
from autopar.trace.flat import BUFFER, INPUT, PARAM, Flat
from autopar.trace.inputs import BoundInputs
from autopar.trace.known.numbers import Known
from autopar.trace.layers import blocks as blocks_
from autopar.trace.loss import LossFn, Root
from autopar.trace.opaque.standins import StandIns
from autopar.trace.own_gradients import gradients_kept
from autopar.trace.shadow import shadow
from autopar.trace.sizes import spec_of
from autopar.trace.two_sizes import SIZES, blended
from autopar.trace.undisturbed import nothing_left, without_autocast, without_checks

AUTOCAST = "forward asks for autocast: dtypes are those of the plan all the same"


@dataclass(frozen=True)
class Attempt:
    """How to export: the batch as a symbol, from two sizes or the one given; equal blocks once for all or each."""

    batch: Literal["symbol", "two sizes", "given"]
    grouped: bool


@dataclass(frozen=True)
class Exporter:
    """What is exported: a model with inputs, a compute dtype, a loss, and submodules that stand as one operator."""

    model: nn.Module
    inputs: BoundInputs
    dtype: torch.dtype | None
    loss_fn: LossFn | None
    stand_ins: StandIns

    def export(self, attempt: Attempt) -> Flat:
        """The model's operators. Raises whatever torch or the model raise."""
        if attempt.batch == "two sizes":
            small, large = (self._export(size, False, attempt.grouped, told=True) for size in SIZES)
            return blended(small, large)
        # A symbolic size must not be 0 or 1 when it is traced: torch takes those for constants.
        symbolic = attempt.batch == "symbol"
        batch = max(self.inputs.batch or 0, 2) if symbolic else self.inputs.batch
        return self._export(batch, symbolic, attempt.grouped, told=symbolic)

    def error_of_forward(self) -> Exception | None:
        """What the model raises on meta tensors like the inputs given, called by itself; None if it runs."""
        root = Root(shadow(self.model, self.dtype), self.inputs, self.loss_fn)
        try:
            with Known(), without_checks(), without_autocast():
                root(*self.inputs.on_meta(self.inputs.batch, self.dtype))
        except Exception as error:  # whatever models raise
            return error
        return None

    def _export(self, batch: int | None, symbolic: bool, grouped: bool, told: bool) -> Flat:
        """Export at `batch`; `told`: its sizes are told from others by their number where the batch is no symbol."""
        root = Root(shadow(self.model, self.dtype), self.inputs, self.loss_fn)
        tensors = self.inputs.on_meta(batch, self.dtype)
        names = _canonical_names(root.model)
        params = {n: replace(spec_of(p), requires_grad=p.requires_grad) for n, p in root.model.named_parameters()}
        buffers = {n: spec_of(b) for n, b in root.model.named_buffers()}
        blocks, note = (
            self._blocks(root, SIZES[0] if symbolic and self.stand_ins.paths else batch, told) if grouped else ([], "")
        )
        # sizes that are numbers where the batch is a symbol don't depend on it, whatever the symbol stood for
        self.stand_ins.install(root.model, batch if told and not symbolic else None)
        try:
            blocks_.install(root, blocks)
            dim = torch.export.Dim("batch", min=1)
            shapes = (tuple({0: dim} if shares else {} for shares in self.inputs.batched),)
            with Known(), gradients_kept(), without_checks(), without_autocast() as casts, _quiet_failure():
                program = torch.export.export(root, tensors, dynamic_shapes=shapes if symbolic else None, strict=False)
            converter = Converter(program, self.inputs.names, names, blocks, self.stand_ins.forms)
        finally:
            for block in blocks:
                marker.forget(block.kind)
        notes = (note, AUTOCAST if any(casts) else "")
        return self._flat(root, converter, names, params, buffers, tuple(filter(None, notes)))

    def _blocks(self, root: Root, batch: int | None, told: bool) -> tuple[list[blocks_.Block], str]:
        """The repeated blocks of the model, run once on meta at `batch`."""
        tensors = self.inputs.on_meta(batch, self.dtype)
        self.stand_ins.install(root.model, batch if told else None)
        with Known(), gradients_kept(), without_checks(), without_autocast(), nothing_left(root):
            return blocks_.find(root, tensors)

    def _flat(
        self,
        root: Root,
        converter: Converter,
        names: dict[str, str],
        params: dict[str, TensorSpec],
        buffers: dict[str, TensorSpec],
        notes: tuple[str, ...],
    ) -> Flat:
        outcome = root.outcome
        if outcome.stands_in:
            notes += ("the model returns no scalar and no loss_fn was given: planned on the sum of its float outputs",)
        if outcome.unasked:
            notes += (f"loss_fn is not called: the model returns a scalar ({outcome.unasked}), which is the loss",)
        if outcome.draws:
            notes += ("forward draws from Python's or numpy's random numbers: what it drew once is part of the plan",)
        own = {PARAM + n: s for n, s in params.items()} | {BUFFER + n: s for n, s in buffers.items()}
        return Flat(
            items=tuple(converter.items),
            values=converter.values | own,
            inputs=tuple(INPUT + n for n in self.inputs.names),
            params=params,
            buffers=buffers,
            aliases={name: first for name, first in names.items() if name != first},
            outputs=tuple(dict.fromkeys(converter.outputs)),
            loss=None if outcome.loss_at is None else converter.outputs[outcome.loss_at],
            assumptions=notes,
        )


@contextmanager
def _quiet_failure() -> Iterator[None]:
    """Keep to itself what torch says before it raises: the graph so far, frames. Other attempts may succeed."""
    said = io.StringIO()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(said):
            yield
    finally:
        logger.setLevel(level)
    sys.stderr.write(said.getvalue())


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for group in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in group:
            names[name] = first.setdefault(id(tensor), name)
    return names
