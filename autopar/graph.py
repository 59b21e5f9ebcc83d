"""The vocabulary of a traced model: values, operators, layers, layer classes and layouts. Frozen and torch-free.

A model becomes an `OpGraph`: a chain of layers over *cuts*. Equal layers share one `LayerClass`, so nothing grows
with depth. Everything the emitter needs to run an operator is in its `Op`; no torch object is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeAlias, TypeVar

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16,
}  # fmt: skip


Record = TypeVar("Record")


def hashed_once(record: type[Record]) -> type[Record]:
    """Make a frozen dataclass (without slots) keep its hash: a record that is made once and looked up by often.

    The hash isn't sent to other processes, where that of a text is another.
    """
    found = record.__hash__

    def kept_hash(self: Any) -> int:
        kept: dict[str, Any] = self.__dict__
        if "_hash" not in kept:
            kept["_hash"] = found(self)
        return int(kept["_hash"])

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    record.__hash__, record.__getstate__ = kept_hash, state  # type: ignore[method-assign]
    return record


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Length of a tensor dim as a linear function of the batch: `per_sample * batch + fixed`."""

    per_sample: int
    fixed: int = 0

    def at(self, batch: int) -> int:
        """The length at a global (micro)batch of `batch` samples."""
        return self.per_sample * batch + self.fixed

    @property
    def is_batch(self) -> bool:
        """Whether the dim grows with the batch (it is then the batch dim, possibly merged with inner dims)."""
        return self.per_sample != 0

    def __str__(self) -> str:
        if not self.per_sample:
            return str(self.fixed)
        scaled = "B" if self.per_sample == 1 else f"{self.per_sample}B"
        return scaled if not self.fixed else f"{scaled}+{self.fixed}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a value; `requires_grad` says whether a gradient flows to it in training."""

    shape: tuple[Extent, ...]
    dtype: str
    requires_grad: bool = False

    def shape_at(self, batch: int) -> tuple[int, ...]:
        """The concrete shape at `batch` samples."""
        return tuple([e.per_sample * batch + e.fixed for e in self.shape])

    @property
    def batch_dim(self) -> int | None:
        """Index of the first dim that grows with the batch, or None."""
        return next((i for i, e in enumerate(self.shape) if e.is_batch), None)

    def bytes_at(self, batch: int) -> int:
        """Size of the whole (unsharded) tensor at `batch` samples."""
        n = DTYPE_BYTES[self.dtype]
        for e in self.shape:
            n *= e.at(batch)
        return n


# --- operator arguments: plain Python scalars and lists, plus these three markers -------------------------------


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value called `name` of the same layer class."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype by name, for example `float32`."""

    name: str


@dataclass(frozen=True, slots=True)
class DeviceArg:
    """'The device the layer runs on': replaced when the layer is emitted."""


Argument: TypeAlias = "Ref | Dtype | DeviceArg | Extent | int | float | bool | str | tuple[Argument, ...] | None"


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps of one op for its backward.

    `values` are names of operands or results of the op; `extra` are tensors born inside it (log-softmax, statistics).
    """

    values: tuple[str, ...] = ()
    extra: tuple[TensorSpec, ...] = ()


@hashed_once
@dataclass(frozen=True)
class Op:
    """One ATen call: `results = target(*args, **kwargs)`.

    `target` is the overload's qualified name (`aten.linear.default`). `results` names one value per output tensor;
    an op returning a list (`split`) has several and there are no getitem ops. `alias_of[i]` is the name of the operand
    whose storage result `i` shares, else None. `module` is the path of the module the op came from, in the model.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    results: tuple[str, ...]
    alias_of: tuple[str | None, ...]
    saved: Saved = Saved()
    module: str = field(default="", compare=False)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor arguments in order of appearance (args, then kwargs), repeats kept."""
        return tuple(_refs((*self.args, *(v for _, v in self.kwargs))))


def _refs(argument: object) -> list[str]:
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, tuple):
        return [name for a in argument for name in _refs(a)]
    return []


# --- layers -----------------------------------------------------------------------------------------------------


@hashed_once
@dataclass(frozen=True)
class LayerClass:
    """The computation of one or more equal layers, over local names.

    `inputs`, `params`, `buffers` and every op result are keys of `values`. `outputs` are names the rest of the model
    reads (an output may be an input passed on). Ops are in execution order.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    values: dict[str, TensorSpec] = field(hash=False)

    @cached_property
    def producer(self) -> dict[str, Op]:
        """Op that makes each result."""
        return {r: op for op in self.ops for r in op.results}

    @cached_property
    def consumers(self) -> dict[str, tuple[Op, ...]]:
        """Ops that read each value, each op once, in execution order."""
        found: dict[str, list[Op]] = {name: [] for name in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.operands):
                found[name].append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    @cached_property
    def root(self) -> dict[str, str]:
        """The value in whose storage each value lies."""
        found = {name: name for name in (*self.inputs, *self.params, *self.buffers)}
        for op in self.ops:
            for result, source in zip(op.results, op.alias_of, strict=True):
                found[result] = found[source] if source else result
        return found

    @cached_property
    def digest(self) -> str:
        """Structural hash: equal for equal computations, module paths left out."""
        ops = [(o.target, repr(o.args), repr(o.kwargs), o.results, repr(o.saved)) for o in self.ops]
        text = json.dumps(
            [self.inputs, self.params, self.buffers, self.outputs, ops, sorted(map(repr, self.values.items()))]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Layer:
    """One place in the model where a class is applied.

    `inputs`, `outputs` are names of model-wide values, `params`, `buffers` the model's own dotted names: each in the
    order of the class's tuple of the same name.
    """

    name: str
    class_index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """The values that cross from one layer to the next.

    `main` is the one whose layout the search chooses (the largest activation; before the first layer the largest
    input); every other value in `values` follows it (see `follow_layout`).
    """

    main: str
    values: tuple[str, ...]


Constant: TypeAlias = "int | float | bool | str | None"
"""An argument of the model that is no tensor; other objects are kept as a text that tells their kind."""


@dataclass(frozen=True)
class LossForm:
    """How samples meet in the loss: `sum`, `mean` (over equal counts) or `count` (mean over targets not ignored).

    For `count`: samples meet in the op called `op` of layer `layer`, whose targets are the value `target` of its class,
    less those equal to `ignore_index`; targets follow from the model's inputs alone.
    """

    kind: str
    layer: int = -1
    op: str = ""
    target: str = ""
    ignore_index: int = -100


@dataclass(frozen=True)
class OpGraph:
    """A traced model: `layers` in execution order, `cuts[i]` in front of layer `i` and `cuts[-1]` behind the last.

    `values` holds the model-wide values (inputs and layer outputs), `params` and `buffers` the model's own under their
    canonical dotted names; `aliases` maps every further name of a tied parameter or buffer to its canonical one.
    `updates` names, for each buffer that forward changes, the layer output that is its new value (in no cut).
    `inputs` are the tensor inputs by flattened keyword path; `constants` the other arguments by theirs, with the value
    they were traced with. `loss` is the scalar value to minimise, or None.
    `outputs` are the values behind the last cut that the model returns. `separable` says whether the batch may be
    split in time (microbatches): `loss_form` then says how the losses of the parts make up that of the whole, else
    `why_not_separable` names what couples samples.
    """

    classes: tuple[LayerClass, ...]
    layers: tuple[Layer, ...]
    cuts: tuple[Cut, ...]
    inputs: tuple[str, ...]
    values: dict[str, TensorSpec] = field(hash=False)
    params: dict[str, TensorSpec] = field(hash=False)
    buffers: dict[str, TensorSpec] = field(hash=False)
    aliases: dict[str, str] = field(hash=False)
    updates: dict[str, str] = field(default_factory=dict, hash=False)
    loss: str | None = None
    outputs: tuple[str, ...] = ()
    token_dim: Extent | None = None
    separable: bool = True
    why_not_separable: str = ""
    loss_form: LossForm | None = None
    constants: dict[str, Constant] = field(default_factory=dict, hash=False)
    assumptions: tuple[str, ...] = ()

    @property
    def only_batch(self) -> int | None:
        """The samples of the one batch that the graph holds for, where none of its inputs' sizes follows the batch."""
        specs = [self.values[name] for name in self.inputs]
        if any(spec.batch_dim is not None for spec in specs):
            return None
        return next((spec.shape[0].fixed for spec in specs if spec.shape), None)

    @cached_property
    def digest(self) -> str:
        """Hash of the whole model's structure and shapes: what `optimize` compares a plan with."""
        text = json.dumps([
            [c.digest for c in self.classes],
            [(x.name, x.class_index, x.inputs, x.outputs, x.params, x.buffers) for x in self.layers],
            sorted(map(repr, self.params.items())), sorted(self.aliases.items()), self.loss or "",
            sorted(self.updates.items()),
        ])  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- layouts ----------------------------------------------------------------------------------------------------

Layout: TypeAlias = tuple[int, ...]
"""How a value lies over the mesh: one placement per mesh axis. A placement >= 0 is the tensor dim the axis splits
(several axes on one dim split it in axis order, first axis outermost; `part_of` says where); the others are below."""

REPLICATE = -1
"""Every rank of the axis holds the value; its gradient is whole on every rank, too."""
PARTIAL = -2
"""The value is the sum over the axis' ranks of what they hold; its gradient is whole on every rank."""
BROADCAST = -3
"""Every rank of the axis holds the value and uses it for its own share of the work: the gradient is the sum over the
axis' ranks of what they hold. This is how data-parallel parameters, and inputs of column-parallel layers, lie."""


def layout_text(layout: Layout) -> str:
    """Short text of a layout: `S0` split on dim 0, `R`, `P`, `B`, one per axis; inverse of `parse_layout`."""
    return " ".join("RPB"[-p - 1] if p < 0 else f"S{p}" for p in layout)


def parse_layout(text: str) -> Layout:
    """Inverse of `layout_text`; raises ValueError on anything else."""
    return tuple(-1 - "RPB".index(t) if not t.startswith("S") else int(t[1:]) for t in text.split())


def part_of(extent: Extent, batch: int, sizes: Sequence[int], place: Sequence[int]) -> tuple[int, int]:
    """First element and length of the part of a dim at `place`, split over axes of `sizes`, the first one outermost.

    Each axis cuts what it finds into equal parts, of which the last ones are shorter or empty where it doesn't divide
    (as `torch.chunk` and DTensor do). A dim of samples is cut between samples as long as there is one for each rank.
    """
    first, length, unit = 0, extent.at(batch), unit_of(extent)
    for size, index in zip(sizes, place, strict=True):
        part, unit = largest_part(length, unit, size)
        start = min(index * part, length)
        first, length = first + start, min(part, length - start)
    return first, length


def largest_part(length: int, unit: int, size: int) -> tuple[int, int]:
    """Length of the largest of the parts that an axis of `size` cuts a dim into, and the unit they may be cut in."""
    unit = unit if length >= size * unit else 1
    return -(-length // (size * unit)) * unit, unit


def is_even(length: int, unit: int, sizes: Sequence[int]) -> bool:
    """Whether axes of `sizes` cut a dim of so many elements, in units of so many, into equal parts."""
    part = length
    for size in sizes:
        part, unit = largest_part(part, unit, size)
    return part * prod(sizes) == length


def unit_of(extent: Extent) -> int:
    """Elements that belong to one sample; 1 in dims that aren't made of samples alone."""
    return extent.per_sample if extent.per_sample and not extent.fixed else 1


def is_dealt(extent: Extent, batch: int, ways: int) -> bool:
    """Whether a dim may be split over so many ranks: it divides, or has a piece (an element, a sample) for each."""
    length = extent.at(batch)
    return length % ways == 0 or length >= ways * unit_of(extent)


def axes_of(layout: Sequence[int], dim: int) -> tuple[int, ...]:
    """Axes that split a dim, outermost first."""
    return tuple(a for a, placement in enumerate(layout) if placement == dim)


def local_shape(
    spec: TensorSpec, batch: int, layout: Layout, sizes: tuple[int, ...], place: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Shape of the shard at `place` on axes of `sizes`, by default the first one: none is larger in any dim."""
    local = [e.per_sample * batch + e.fixed for e in spec.shape]
    units: dict[int, int] = {}
    for axis, placement in enumerate(layout):
        if placement >= 0:
            length, unit = local[placement], units.get(placement) or unit_of(spec.shape[placement])
            part, units[placement] = largest_part(length, unit, sizes[axis])
            local[placement] = max(0, min(part, length - part * place[axis])) if place else part
    return tuple(local)


def follow_layout(main: TensorSpec, layout: Layout, other: TensorSpec) -> Layout:
    """Layout of a value that crosses a cut beside the main one.

    Where the main value is split on its batch dim, so is the other (if it has one); elsewhere it is replicated.
    """
    batch = main.batch_dim
    mine = other.batch_dim
    return tuple(mine if p >= 0 and p == batch and mine is not None else REPLICATE for p in layout)


# --- what the profiler times and the cost model prices ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of an `OpKey`: its local shape, dtype and whether a gradient is wanted for it."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


@hashed_once
@dataclass(frozen=True)
class OpKey:
    """One local operator call, complete enough to be rebuilt and timed anywhere: tensors are `Operand`s."""

    target: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """One collective over a group: `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or broadcast.

    `bytes` is the size of the full buffer (the gathered or reduced whole, or the whole exchanged by one rank).
    `ranks` counts the group, `stride` is the distance between neighbouring ranks of the group in the cluster.
    """

    kind: str
    bytes: int
    ranks: int
    stride: int = 1
