"""Activation bytes of a lowered layer, by walking it once forward and once backward as the emitted code runs it.

Forward: a value lives until its last reader; what autograd saves lives on. Backward: each step frees what it alone
still needed, and makes gradients of the operands that want one; views and sums pass theirs on without a new buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from autopar.cost.work import is_pointwise, passes_gradient
from autopar.graph import DTYPE_BYTES, LayerClass, local_shape
from autopar.shard.program import Program, Relayout, Step
from autopar.shard.saved import inner_saved_bytes, saved_names


@dataclass(frozen=True)
class Activations:
    """Bytes on one device: kept for the backward, and the most needed at once beyond that while the layer runs.

    `recomputed_saved` and `recomputed_transient` are the same where only inputs are kept and the layer runs again in
    its backward.
    """

    saved: int
    transient: int
    recomputed_saved: int
    recomputed_transient: int


def activations(
    program: Program,
    batch: int,
    held: frozenset[str] = frozenset(),
    unread: frozenset[int] = frozenset(),
    promised: frozenset[int] = frozenset(),
    accumulates: bool = False,
) -> Activations:
    """Activations of `program` at a global microbatch of `batch` samples.

    `held` names inputs that an earlier layer keeps: they cost nothing here. `promised` are positions, among inputs and
    then outputs, of what later layers take to be kept by this one: it counts here, however the layer is run. `unread`
    are positions of outputs for which no gradient comes back. With `accumulates`, a parameter's new gradient exists
    beside the sum it is added to.
    """
    walk = _Walk(program, batch, held, unread, accumulates)
    ends = [walk.storage[name] for name in (*program.inputs, *program.outputs)]
    inputs, owed = set(ends[: len(program.inputs)]), {ends[i] for i in promised}
    saved = walk.bytes_of(walk.saved | owed) + sum(walk.extra_saved)
    again = walk.bytes_of(inputs | owed)
    peak = max(walk.forward_peak(), walk.backward_peak())
    whole_peak = peak + walk.bytes_of(inputs - walk.saved)
    return Activations(saved, max(0, peak - saved), again, max(0, whole_peak - again))


def outputs_saved(layer: LayerClass) -> frozenset[str]:
    """Inputs and outputs of a layer whose storage one of its ops saves: whoever reads them next keeps them for free."""
    root: dict[str, str] = {}
    for op in layer.ops:
        for result, source in zip(op.results, op.alias_of, strict=True):
            root[result] = root.get(source, source) if source else result
    saved = {root.get(name, name) for op in layer.ops for name in op.saved.values}
    return frozenset(n for n in (*layer.inputs, *layer.outputs) if root.get(n, n) in saved)


@dataclass
class _Walk:
    """Storages of a program and the two walks over its steps. A storage is named by the first value that lies in it."""

    program: Program
    batch: int
    held: frozenset[str]
    unread: frozenset[int]
    accumulates: bool
    storage: dict[str, str] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.program.params, *self.program.buffers):
            self.storage[name], self.size[name] = name, 0  # counted as parameters
        for name in self.program.inputs:
            self.storage[name], self.size[name] = name, 0 if name in self.held else self.local_bytes(name)
        for step in self.program.steps:
            for name, source in _results(step):
                self.storage[name] = self.storage[source] if source else name
                self.size.setdefault(self.storage[name], self.local_bytes(name))

    def local_bytes(self, name: str) -> int:
        """Bytes of one device's shard of a value."""
        spec = self.program.values[name]
        shape = local_shape(spec.shape_at(self.batch), self.program.layouts[name], self.program.axis_sizes)
        return prod(shape) * DTYPE_BYTES[spec.dtype]

    def bytes_of(self, storages: Iterable[str]) -> int:
        """Bytes of storages, each counted once."""
        return sum(self.size[s] for s in set(storages))

    @cached_property
    def kept(self) -> list[set[str]]:
        """Storages that the backward of each step reads."""
        return [self._kept_by(step) for step in self.program.steps]

    @cached_property
    def saved(self) -> set[str]:
        """Storages kept for the backward."""
        return set[str]().union(*self.kept)

    @cached_property
    def extra_saved(self) -> list[int]:
        """Bytes born inside each step and kept for its backward."""
        return [self._extra(step) for step in self.program.steps]

    def _kept_by(self, step: Step) -> set[str]:
        return set() if isinstance(step, Relayout) else {self.storage[name] for name in saved_names(step)}

    def _extra(self, step: Step) -> int:
        return 0 if isinstance(step, Relayout) else inner_saved_bytes(step, self.program, self.batch)

    # --- forward --------------------------------------------------------------------------------------------------

    def forward_peak(self) -> int:
        """Most bytes at once in the forward pass, what is saved so far included; the caller holds the inputs."""
        steps = self.program.steps
        forever = {self.storage[n] for n in (*self.program.inputs, *self.program.outputs)}
        last = {self.storage[name]: i for i, step in enumerate(steps) for name in _reads(step)}
        live = {self.storage[n] for n in self.program.inputs}
        peak = extra = 0
        for i, step in enumerate(steps):
            live |= {self.storage[name] for name, _ in _results(step)}
            extra += self.extra_saved[i]
            peak = max(peak, self.bytes_of(live) + extra + self._forward_buffer(step))
            live -= {s for s in live if last.get(s, i) <= i and s not in self.saved | forever}
        return peak

    def _forward_buffer(self, step: Step) -> int:
        """A gather or scatter along an inner dim goes through a second buffer."""
        if isinstance(step, Relayout) and any(m.kind != "slice" and max(m.dim, m.to_dim) > 0 for m in step.forward):
            return max(self.local_bytes(step.source), self.local_bytes(step.result))
        return 0

    # --- backward -------------------------------------------------------------------------------------------------

    def backward_peak(self) -> int:
        """Most bytes at once in the backward pass: what is still saved, gradients, and buffers of single ops."""
        needed = [(i, s) for i, storages in enumerate(self.kept) for s in storages]
        first_need = {s: min(i for i, t in needed if t == s) for _, s in needed}
        read = [n for i, n in enumerate(self.program.outputs) if self._wants(n) and i not in self.unread]
        gradients = {n: (n, self.local_bytes(n)) for n in read}
        peak = 0
        for i in reversed(range(len(self.program.steps))):
            step = self.program.steps[i]
            saved = self.bytes_of(s for s, first in first_need.items() if first <= i) + sum(self.extra_saved[: i + 1])
            arriving = [gradients.pop(name) for name, _ in _results(step) if name in gradients]
            if not arriving:
                continue
            made = self._gradients_made(step, i, arriving)
            live = dict([*arriving, *gradients.values(), *made.values()])
            peak = max(peak, saved + sum(live.values()) + self._backward_buffer(step))
            gradients.update(made)
        return peak

    def _wants(self, name: str) -> bool:
        return self.program.values[name].requires_grad

    def _gradients_made(self, step: Step, position: int, arriving: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
        """Buffers of the gradients a step makes, by value: (name of the buffer, bytes)."""
        made = {}
        for name in dict.fromkeys(_reads(step)):
            if self._wants(name) and name not in self.program.params:
                size = self.local_bytes(name)
                passed = _passes_on(step) and size <= arriving[0][1]
                made[name] = arriving[0] if passed else (f"{name} from {position}", size)
        return made

    def _backward_buffer(self, step: Step) -> int:
        """Buffers of one step's backward beside the gradients of its operands."""
        if isinstance(step, Relayout):
            return 0
        own = [self.local_bytes(n) for n in step.operands if n in self.program.params and self._wants(n)]
        result = max(self.local_bytes(name) for name in step.op.results)
        buffer = sum(own) if self.accumulates else 0
        if is_pointwise(step.op.target) and any(self._wants(n) and self.local_bytes(n) < result for n in step.operands):
            buffer += result  # the gradient before it is summed for the operand that was broadcast
        if ".cross_entropy_loss" in step.op.target:
            buffer += self.local_bytes(step.operands[0])  # gradient of the log-softmax
        return buffer


def _reads(step: Step) -> tuple[str, ...]:
    return (step.source,) if isinstance(step, Relayout) else step.operands


def _results(step: Step) -> list[tuple[str, str | None]]:
    """Names a step makes, each with the name it shares its storage with."""
    if isinstance(step, Relayout):
        return [(step.result, None if step.forward else step.source)]
    read_as = dict(zip(step.op.operands, step.operands, strict=True))
    return [(r, read_as[a] if a else None) for r, a in zip(step.op.results, step.op.alias_of, strict=True)]


def _passes_on(step: Step) -> bool:
    """Whether the gradient of a step's operand is that of its result, in the same buffer."""
    if isinstance(step, Relayout):
        return not step.backward
    return passes_gradient(step.op.target)
