"""Activation bytes of a lowered layer, by walking it once forward and once backward as the emitted code runs it.

Forward: a value lives until its last reader; what autograd saves lives on. Backward: each step frees what it alone
still needed, and makes gradients of the operands that want one; views and sums pass theirs on without a new buffer.
Of a region that runs again in the backward pass what it reads lives on; what its own steps save is there from when it
has run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar

from autopar.cost.work import is_pointwise, passes_gradient
from autopar.graph import DTYPE_BYTES, LayerClass, local_shape
from autopar.shard.program import Program, Relayout, Step, read_by
from autopar.shard.put_off import product_with_weight
from autopar.shard.regions import rerun_regions
from autopar.shard.saved import inner_saved_bytes, run_again, saved_names


@dataclass(frozen=True)
class Activations:
    """Bytes on one device: `saved` for the backward, and the most needed at once beyond that in each pass.

    `growing`: in the backward pass if the gradients of parameters are made anew in it and pile up until its end.
    `put_off`: what gradients of weights are made from, where that is put off: operands and gradients of products.
    `parting`: in the backward pass if what is put off stays, and nothing is made of it. `to_host`: of each storage that
    goes to the host in the forward pass, and comes back in the backward.
    """

    saved: int
    forward: int
    backward: int
    growing: int
    put_off: int = 0
    parting: int = 0
    to_host: tuple[int, ...] = ()


def activations(
    program: Program,
    batch: int,
    held: frozenset[str] = frozenset(),
    unread: frozenset[int] = frozenset(),
    promised: frozenset[int] = frozenset(),
    accumulates: bool = False,
    offloaded: bool = False,
) -> Activations:
    """Activations of `program` at a global microbatch of `batch` samples.

    `held` names inputs that an earlier layer keeps: they cost nothing here. `promised` are positions, among inputs and
    then outputs, of what later layers take to be kept by this one: it counts here, however the layer is run. `unread`
    are positions of outputs for which no gradient comes back. With `accumulates`, a parameter's new gradient exists
    beside the sum it is added to. `offloaded`: what is saved is kept in the host's memory, by all layers.
    """
    walk = (_Offloaded if offloaded else _Walk)(program, batch, held, unread, accumulates)
    ends = [walk.storage[name] for name in (*program.inputs, *program.outputs)]
    saved = walk.bytes_of(walk.saved | {ends[i] for i in promised if walk.stays(ends[i])}) + sum(walk.extra_saved)
    *backward, put_off = walk.backward_peaks()
    forward, back, growing, parting = (max(0, peak - saved) for peak in (walk.forward_peak(), *backward))
    return Activations(saved, forward, back, growing, put_off, parting, walk.to_host)


@lru_cache(maxsize=256)
def outputs_saved(layer: LayerClass) -> frozenset[str]:
    """Inputs and outputs of a layer whose storage one of its ops saves: whoever reads them next keeps them for free.

    Inputs without a gradient that a core of attention reads (masks) count as saved, too: recomputed cores keep them.
    """
    saved = {layer.root[name] for op in layer.ops for name in op.saved.values}
    cores = frozenset[str]().union(*rerun_regions(layer, "selective"))
    masks = {layer.root[name] for op in layer.ops if op.name in cores for name in op.operands}
    saved |= {name for name in masks if name in layer.inputs and not layer.values[name].requires_grad}
    return frozenset(n for n in (*layer.inputs, *layer.outputs) if layer.root[n] in saved)


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
    _made: dict[range, set[str]] = field(default_factory=dict)
    _local: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.program.params, *self.program.buffers):
            self.storage[name], self.size[name] = name, 0  # counted as parameters
        for name in self.program.inputs:
            free = name in self.held and self.stays(name)
            self.storage[name], self.size[name] = name, 0 if free else self.local_bytes(name)
        for step in self.program.steps:
            for name, source in _results(step):
                self.storage[name] = self.storage[source] if source else name
                self.size.setdefault(self.storage[name], self.local_bytes(name))

    def local_bytes(self, name: str) -> int:
        """Bytes of one device's shard of a value."""
        if name not in self._local:
            spec = self.program.values[name]
            shape = local_shape(spec, self.batch, self.program.layouts[name], self.program.axis_sizes)
            self._local[name] = prod(shape) * DTYPE_BYTES[spec.dtype]
        return self._local[name]

    def bytes_of(self, storages: Iterable[str]) -> int:
        """Bytes of storages, each counted once."""
        return sum(self.size[s] for s in set(storages))

    @cached_property
    def kept(self) -> list[set[str]]:
        """Storages that the backward of each step reads."""
        return [
            set() if isinstance(step, Relayout) else {self.storage[name] for name in saved_names(step)}
            for step in self.program.steps
        ]

    @cached_property
    def extra(self) -> list[int]:
        """Bytes born inside each step that its backward reads."""
        return [
            0 if isinstance(step, Relayout) else inner_saved_bytes(step, self.program, self.batch)
            for step in self.program.steps
        ]

    @cached_property
    def region_of(self) -> dict[int, range]:
        """The region of each step that is in one."""
        return {i: region for region in self.program.regions for i in region}

    @cached_property
    def needed_from(self) -> dict[str, int]:
        """Storages kept for the backward, with the first step that needs them: the last to do so in the backward."""
        first: dict[str, int] = {}
        for region in self.program.regions:
            for name in self.program.entering(region):
                first[self.storage[name]] = min(region.start, first.get(self.storage[name], region.start))
        for i, storages in enumerate(self.kept):
            for s in storages if i not in self.region_of else ():
                first[s] = min(i, first.get(s, i))
        return first

    @property
    def saved(self) -> set[str]:
        """Storages kept for the backward."""
        return {*self.needed_from}

    @cached_property
    def extra_saved(self) -> list[int]:
        """Bytes born inside each step and kept for the backward."""
        return [0 if i in self.region_of else size for i, size in enumerate(self.extra)]

    to_host: ClassVar[tuple[int, ...]] = ()

    def stays(self, storage: str) -> bool:  # noqa: ARG002 - all do
        """Whether a storage is kept on the device where it is saved."""
        return True

    def needed_at(self, position: int) -> set[str]:
        """Saved storages that are on the device while the step at `position` runs backward."""
        return {s for s, first in self.needed_from.items() if first <= position}

    def inner_at(self, position: int) -> int:
        """Saved bytes born inside steps that are there then."""
        return sum(self.extra_saved[: position + 1])

    # --- forward --------------------------------------------------------------------------------------------------

    def forward_peak(self) -> int:
        """Most bytes at once in the forward pass, what is saved so far included; the caller holds the inputs."""
        steps = self.program.steps
        forever = {self.storage[n] for n in (*self.program.inputs, *self.program.outputs)}
        last = {self.storage[name]: i for i, step in enumerate(steps) for name in read_by(step)}
        live = {self.storage[n] for n in self.program.inputs}
        peak = extra = 0
        forever |= self.saved
        for i, step in enumerate(steps):
            live |= {self.storage[name] for name, _ in _results(step)}
            peak = max(peak, self.bytes_of(live) + extra + self.extra[i] + self._forward_buffer(step))
            extra += self.extra_saved[i]
            live -= {s for s in live if last.get(s, i) <= i and s not in forever}
        return peak

    def _forward_buffer(self, step: Step) -> int:
        """A gather or scatter along an inner dim goes through a second buffer."""
        if isinstance(step, Relayout) and any(m.kind != "slice" and max(m.dim, m.to_dim) > 0 for m in step.forward):
            return max(self.local_bytes(step.source), self.local_bytes(step.result))
        return 0

    # --- backward -------------------------------------------------------------------------------------------------

    def backward_peaks(self) -> tuple[int, int, int, int]:
        """Most bytes at once in the backward pass: what is still saved, gradients, and buffers of single ops.

        Without gradients of parameters, with those that the pass has made so far, and where gradients of weights are
        put off (the second half then adds one weight's to its sum). Then the bytes of what those are made from: the
        operands of products, and the gradients that arrive at them, each once.
        """
        read = [n for i, n in enumerate(self.program.outputs) if self._wants(n) and i not in self.unread]
        gradients = {n: (n, self.local_bytes(n)) for n in read}
        rerun: set[range] = set()
        grown: dict[str, int] = {}
        peak = growing = parting = weight = 0
        operands: set[str] = set()
        waiting: dict[str, int] = {}
        for i in reversed(range(len(self.program.steps))):
            step = self.program.steps[i]
            arriving = [gradients.pop(name) for name, _ in _results(step) if name in gradients]
            if not arriving:
                continue
            needed, inner = self.needed_at(i), self.inner_at(i)
            region = self.region_of.get(i)
            if region is not None and region not in rerun:
                rerun.add(region)
                again = inner + self._rerun_peak(region)
                still = dict([*arriving, *gradients.values()])
                parting = max(parting, again + self.bytes_of(needed | operands) + sum((still | waiting).values()))
                again += self.bytes_of(needed) + sum(still.values())
                peak, growing = max(peak, again), max(growing, again + sum(grown.values()))
            roles = None if isinstance(step, Relayout) else product_with_weight(step, self.program)
            if roles:
                operands.add(self.storage[read_by(step)[roles.x]])
                waiting |= arriving
                weight = max(weight, sum(self._own_gradients(step).values()))
            made = self._gradients_made(step, i, arriving)
            live = dict([*arriving, *gradients.values(), *made.values()])
            if region:
                needed |= self._rerun(region, i)
                inner += sum(self.extra[region.start : i + 1])
            own = self._own_gradients(step)
            grown |= own
            beside = sum(own.values()) if self.accumulates else 0
            inner += self._backward_buffer(step)
            now = inner + self.bytes_of(needed) + sum(live.values())
            peak = max(peak, now + beside)
            growing = max(growing, now + sum(grown.values()))
            now = inner + self.bytes_of(needed | operands) + sum((live | waiting).values())
            parting = max(parting, now + (0 if roles else beside))
            gradients.update(made)
        late = sum(map(self.local_bytes, operands)) + sum(waiting.values())
        return peak, growing, max(parting, late + weight), late

    def _rerun(self, region: range, position: int) -> set[str]:
        """Storages made anew by a region that its steps up to the one at `position` need in their backward."""
        return {s for i in range(region.start, position + 1) for s in self.kept[i]} & self._made_in(region)

    def _rerun_peak(self, region: range) -> int:
        """Most bytes at once that a region makes while it runs again."""
        again = run_again(region, self.program.steps)
        made = self._made_in(region)
        forever = {s for i in region for s in self.kept[i]}
        last = {self.storage[name]: i for i in again for name in read_by(self.program.steps[i])}
        live: set[str] = set()
        peak = extra = 0
        for i in again:
            step = self.program.steps[i]
            live |= {self.storage[name] for name, _ in _results(step)} & made
            extra += self.extra[i]
            peak = max(peak, self.bytes_of(live) + extra + self._forward_buffer(step))
            live -= {s for s in live if last.get(s, i) <= i and s not in forever}
        return peak

    def _made_in(self, region: range) -> set[str]:
        """Storages that a region makes."""
        if region not in self._made:
            self._made[region] = self._find_made_in(region)
        return self._made[region]

    def _find_made_in(self, region: range) -> set[str]:
        made = {self.storage[name] for i in region for name, _ in _results(self.program.steps[i])}
        return made - {self.storage[name] for name in self.program.entering(region)}

    def _wants(self, name: str) -> bool:
        return self.program.values[name].requires_grad

    def _gradients_made(self, step: Step, position: int, arriving: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
        """Buffers of the gradients a step makes, by value: (name of the buffer, bytes)."""
        made = {}
        for name in dict.fromkeys(read_by(step)):
            if self._wants(name) and name not in self.program.params:
                size = self.local_bytes(name)
                passed = _passes_on(step) and size <= arriving[0][1]
                made[name] = arriving[0] if passed else (f"{name} from {position}", size)
        return made

    def _own_gradients(self, step: Step) -> dict[str, int]:
        """Bytes of the gradients of the parameters that a step reads."""
        if isinstance(step, Relayout):
            return {}
        return {n: self.local_bytes(n) for n in step.operands if n in self.program.params and self._wants(n)}

    def _backward_buffer(self, step: Step) -> int:
        """Buffers of one step's backward beside the gradients of its operands and of parameters."""
        if isinstance(step, Relayout):
            return 0
        result = max(self.local_bytes(name) for name in step.op.results)
        buffer = 0
        if is_pointwise(step.op.target) and any(self._wants(n) and self.local_bytes(n) < result for n in step.operands):
            buffer += result  # the gradient before it is summed for the operand that was broadcast
        if ".cross_entropy_loss" in step.op.target:
            buffer += self.local_bytes(step.operands[0])  # gradient of the log-softmax
        return buffer


class _Offloaded(_Walk):
    """Saved storages leave the device when the last forward step has read them.

    In the backward pass each is there from the first step that asks for it to the last. Integers stay where they are.
    Nothing runs again.
    """

    def stays(self, storage: str) -> bool:
        """Whether it is of integers."""
        return "int" in self.program.values[storage].dtype

    @property
    def saved(self) -> set[str]:
        """Storages that stay."""
        return {s for s in self.needed_from if self.stays(s)}

    @cached_property
    def extra_saved(self) -> list[int]:
        """Nothing born inside steps stays."""
        return [0] * len(self.extra)

    @cached_property
    def last_needed(self) -> dict[str, int]:
        """The last step that needs each storage, the first to do so in the backward pass."""
        return {s: i for i, storages in enumerate(self.kept) for s in storages}

    def needed_at(self, position: int) -> set[str]:
        """Those that stay, and those that have come back and are still to be read."""
        needed = super().needed_at(position)
        return {s for s in needed if self.stays(s) or position <= self.last_needed[s]}

    def inner_at(self, position: int) -> int:
        """What the step itself reads."""
        return self.extra[position]

    @property
    def to_host(self) -> tuple[int, ...]:  # type: ignore[override]
        """Bytes of each storage that doesn't stay."""
        found = [self.size[s] for s in self.needed_from if not self.stays(s)] + self.extra
        return tuple(size for size in found if size)


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
