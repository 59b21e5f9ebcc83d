"""Activation bytes of a lowered layer, by walking it once forward and once backward as the emitted code runs it.

Forward: a value lives until its last reader; what autograd saves lives on. Backward: each step frees what it alone
still needed, and makes gradients of the operands that want one; views and sums pass theirs on without a new buffer.
Of a region that runs again in the backward pass what it reads lives on; what its own steps save is there from when it
has run again. A light one does so as soon as a later step wants what it made, which then stays until its own backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

from autopar.cost.storages import Place, Storages
from autopar.graph import DTYPE_BYTES, LayerClass, local_shape
from autopar.shard.program import Call, Program
from autopar.shard.regions import rerun_regions
from autopar.shard.saved import inner_saved_bytes


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
    storages: Storages | None = None,
) -> Activations:
    """Activations of `program` at a global microbatch of `batch` samples.

    `held` names inputs that an earlier layer keeps: they cost nothing here. `promised` are positions, among inputs and
    then outputs, of what later layers take to be kept by this one: it counts here, however the layer is run. `unread`
    are positions of outputs for which no gradient comes back. With `accumulates`, a parameter's new gradient exists
    beside the sum it is added to. `offloaded`: what is saved is kept in the host's memory, by all layers. `storages`:
    those of the program, where they are known.
    """
    walk = (_Offloaded if offloaded else _Walk)(storages or Storages(program), batch, held, unread, accumulates)
    ends = walk.storages.ends
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


class _Walk:
    """The two walks over a program's steps, with the bytes of its storages."""

    def __init__(
        self, storages: Storages, batch: int, held: frozenset[str], unread: frozenset[int], accumulates: bool
    ) -> None:
        self.storages, self.program, self.batch = storages, storages.program, batch
        self.unread, self.accumulates = unread, accumulates
        self.local = self._local_bytes()
        self.size = {s: self.local[s] for s in storages.of.values()}
        self.size |= dict.fromkeys((*self.program.params, *self.program.buffers), 0)  # counted as parameters
        self.size |= dict.fromkeys((name for name in self.program.inputs if name in held and self.stays(name)), 0)
        self.extra = [
            inner_saved_bytes(step, self.program, batch) if isinstance(step, Call) else 0 for step in self.program.steps
        ]
        self.extra_saved = self._extra_saved()
        self.there = self._there()

    def _local_bytes(self) -> dict[str, int]:
        """Bytes of one device's shard of each value."""
        values, layouts, sizes = self.program.values, self.program.layouts, self.program.axis_sizes
        return {
            name: prod(local_shape(spec, self.batch, layouts[name], sizes)) * DTYPE_BYTES[spec.dtype]
            for name, spec in values.items()
            if name in layouts
        }

    def bytes_of(self, storages: Iterable[str]) -> int:
        """Bytes of storages, each counted once."""
        return sum(self.size[s] for s in set(storages))

    # --- what is saved --------------------------------------------------------------------------------------------

    @property
    def saved(self) -> set[str]:
        """Storages kept for the backward, on the device."""
        return {*self.storages.needed_from}

    @property
    def to_host(self) -> tuple[int, ...]:
        """Bytes of each storage that is kept elsewhere."""
        return ()

    def stays(self, storage: str) -> bool:  # noqa: ARG002 - all do
        """Whether a storage is kept on the device where it is saved."""
        return True

    def _extra_saved(self) -> list[int]:
        """Bytes born inside each step and kept for the backward."""
        return [0 if i in self.storages.region_of else size for i, size in enumerate(self.extra)]

    def _there(self) -> dict[str, tuple[int, int]]:
        """The first and the last step in whose backward each saved storage is on the device."""
        return {s: (first, len(self.extra)) for s, first in self.storages.needed_from.items()}

    def _inner(self) -> list[int]:
        """Saved bytes born inside steps that are there while each step runs backward."""
        return list(accumulate(self.extra_saved))

    def _needed(self) -> list[int]:
        """Bytes of saved storages that are there while each step runs backward."""
        change = [0] * (len(self.extra) + 2)
        for storage, (first, last) in self.there.items():
            change[first] += self.size[storage]
            change[last + 1] -= self.size[storage]
        return list(accumulate(change))

    def _away(self, storages: Iterable[str], position: int) -> int:
        """Bytes of those storages that are not saved and there while the step at `position` runs backward."""
        missing = 0
        for s in storages:
            first, last = self.there.get(s, (1, 0))
            missing += 0 if first <= position <= last else self.size[s]
        return missing

    # --- forward --------------------------------------------------------------------------------------------------

    def forward_peak(self) -> int:
        """Most bytes at once in the forward pass, what is saved so far included; the caller holds the inputs."""
        inputs = {*self.storages.ends[: len(self.program.inputs)]}
        forever = {*self.storages.ends} | self.saved
        return self._peak(range(len(self.extra)), inputs, self.storages.last_used, forever, self.extra_saved)

    def _peak(self, steps: range, live: set[str], last: dict[str, int], forever: Set[str], kept: list[int]) -> int:
        """Most bytes at once while steps run one after the other, `live` at first.

        Counted are storages of which `last` says which step is the last to use them: then they go, but those that stay
        `forever`. `kept` of the bytes born inside each step stay.
        """
        live, total, peak, extra = {*live}, self.bytes_of(live), 0, 0
        for i in steps:
            place = self.storages.steps[i]
            for s in place.made_in:
                if s in last and s not in live:
                    live.add(s)
                    total += self.size[s]
            peak = max(peak, total + extra + self.extra[i] + self._forward_buffer(place))
            extra += kept[i]
            for s in place.used_in:
                if s in live and last[s] == i and s not in forever:
                    live.discard(s)
                    total -= self.size[s]
        return peak

    def _forward_buffer(self, place: Place) -> int:
        """A gather or scatter along an inner dim goes through a second buffer."""
        return max(self.local[n] for n in place.buffered) if place.buffered else 0

    # --- backward -------------------------------------------------------------------------------------------------

    def backward_peaks(self) -> tuple[int, int, int, int]:
        """Most bytes at once in the backward pass: what is still saved, gradients, and buffers of single ops.

        Without gradients of parameters, with those that the pass has made so far, and where gradients of weights are
        put off (the second half then adds one weight's to its sum). Then the bytes of what those are made from: the
        operands of products, and the gradients that arrive at them, each once.
        """
        storages, local = self.storages, self.local
        read = [n for i, n in enumerate(self.program.outputs) if storages.wants(n) and i not in self.unread]
        gradients = {n: (n, local[n]) for n in read}
        needed, inner = self._needed(), self._inner()
        rerun: set[range] = set()
        grown: dict[str, int] = {}
        peak = growing = parting = weight = 0
        operands: set[str] = set()
        held: dict[str, tuple[str, int]] = {}
        waiting: dict[str, int] = {}
        for i in reversed(range(len(storages.steps))):
            place = storages.steps[i]
            arriving = [gradients.pop(name) for name in place.made if name in gradients]
            if not arriving:
                continue
            there, again = needed[i] + inner[i], frozenset[str]()
            for region in self._wanted_at(i):
                if region not in rerun:
                    rerun.add(region)
                    still = dict([*arriving, *gradients.values()])
                    now = there + self._rerun_peak(region) + self._away(again, i) + sum(still.values())
                    peak, growing = max(peak, now), max(growing, now + sum(grown.values()))
                    parting = max(parting, now + self._away(operands - again, i) + _beside(waiting, still))
                again |= storages.again[region].there[min(i, region.stop - 1) - region.start]
                there += sum(self.extra[region.start : min(region.stop, i + 1)])
            own = {name: local[name] for name in place.weights}
            if place.product:
                operands.add(place.product)
                waiting |= arriving
                weight = max(weight, sum(own.values()))
            made = self._gradients_made(place, i, arriving)
            held = self._held(i, held, arriving)
            live = dict([*arriving, *held.values(), *gradients.values(), *made.values()])
            grown |= own
            beside = sum(own.values()) if self.accumulates else 0
            now = there + self._backward_buffer(place) + sum(live.values())
            parted = now + self._away(again | operands, i) + _beside(waiting, live)
            now += self._away(again, i)
            peak = max(peak, now + beside)
            growing = max(growing, now + sum(grown.values()))
            parting = max(parting, parted + (0 if place.product else beside))
            gradients.update(made)
        late = sum(local[s] for s in operands) + sum(waiting.values())
        return peak, growing, max(parting, late + weight), late

    def _held(
        self, position: int, held: dict[str, tuple[str, int]], arriving: list[tuple[str, int]]
    ) -> dict[str, tuple[str, int]]:
        """Gradients of a light region's results, which are there until its backward pass has ended."""
        place, region = self.storages.steps[position], self.storages.region_of.get(position)
        if not self.program.light or region is None:
            return {}
        results = self.storages.again[region].results
        still = {name: own for name, own in held.items() if self.storages.of[name] in results}
        new = [name for name in place.made if self.storages.of[name] in results]
        return still | dict(zip(new, arriving, strict=False))

    def _wanted_at(self, position: int) -> list[range]:
        """Regions of which what they make again is there while the step at `position` runs backward."""
        again = self.storages.again
        return [region for region in again if region.start <= position <= again[region].wanted]

    def _rerun_peak(self, region: range) -> int:
        """Most bytes at once that a region makes while it runs again."""
        again = self.storages.again[region]
        return self._peak(again.steps, set(), again.last, again.kept, self.extra)

    def _gradients_made(
        self, place: Place, position: int, arriving: list[tuple[str, int]]
    ) -> dict[str, tuple[str, int]]:
        """Buffers of the gradients of values a step makes, by value: (name of the buffer, bytes)."""
        made = {}
        for name in place.wanting:
            size = self.local[name]
            passed = place.passes_on and size <= arriving[0][1]
            made[name] = arriving[0] if passed else (f"{name} from {position}", size)
        return made

    def _backward_buffer(self, place: Place) -> int:
        """Buffers of one step's backward beside the gradients of its operands and of parameters."""
        buffer = self.local[place.scored] if place.scored else 0  # gradient of the log-softmax
        if place.summed:
            result = max(self.local[name] for name in place.made)
            if any(self.local[name] < result for name in place.summed):
                buffer += result  # the gradient before it is summed for the operand that was broadcast
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
        return {s for s in self.storages.needed_from if self.stays(s)}

    def _extra_saved(self) -> list[int]:
        """Nothing born inside steps stays."""
        return [0] * len(self.extra)

    def _there(self) -> dict[str, tuple[int, int]]:
        """Of those that don't stay, from where they come back to where they have been read."""
        last = self.storages.last_needed
        return {s: (a, b if self.stays(s) else last[s]) for s, (a, b) in super()._there().items()}

    def _inner(self) -> list[int]:
        """What each step itself reads."""
        return self.extra

    @property
    def to_host(self) -> tuple[int, ...]:
        """Bytes of each storage that doesn't stay."""
        found = [self.size[s] for s in self.storages.needed_from if not self.stays(s)] + self.extra
        return tuple(size for size in found if size)


def _beside(waiting: dict[str, int], live: dict[str, int]) -> int:
    """Bytes of gradients that wait and aren't live."""
    return sum(size for name, size in waiting.items() if name not in live)
