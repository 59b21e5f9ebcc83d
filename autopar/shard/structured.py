"""Lines of ops whose factors depend on their arguments: dims to keep whole, permutations, index lists, options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.graph import Op, Ref, TensorSpec
from autopar.shard.views import view_line
from autopar.trace.opaque.operator import form_of
from autopar.trace.rewrite.equation import terms_of


@dataclass(frozen=True)
class Site:
    """An op with the specs of its operands (repeats kept) and results: all that its line may depend on."""

    op: Op
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument given at `position` or by `name`, else `default`."""
        return self.op.args[position] if len(self.op.args) > position else dict(self.op.kwargs).get(name, default)

    @property
    def rank(self) -> int:
        """Number of dims of the first operand."""
        return len(self.operands[0].shape)

    def dims(self, position: int, name: str, default: Any = None) -> set[int]:
        """Dims of the first operand named by an argument, counted from the left; all of them when it is absent."""
        given = self.argument(position, name, default)
        if given is None or given == () or isinstance(given, bool):
            return set(range(self.rank))
        return {int(d) % max(self.rank, 1) for d in (given if isinstance(given, tuple) else (given,))}


LineMaker: TypeAlias = Callable[[Site], str | None]


def term(rank: int, fixed: Collection[int] = (), dropped: Collection[int] = ()) -> str:
    """Term of a tensor whose dims are the factors d0, d1, ..., but for `fixed` ones; `dropped` dims are left out."""
    return " ".join("_" if d in fixed else f"d{d}" for d in range(rank) if d not in dropped)


def pointwise(site: Site) -> str | None:
    """Elementwise with broadcasting; None where a dim of an operand is neither 1 nor the result's."""
    result = site.results[0].shape
    for spec in site.operands:
        aligned = zip(reversed(spec.shape), reversed(result), strict=False)
        if len(spec.shape) > len(result) or any(e != r and str(e) != "1" for e, r in aligned):
            return None
    return f"{', '.join(['...'] * len(site.operands))} -> {', '.join(['...'] * len(site.results))}"


def view(site: Site) -> str:
    """Any op that only reshapes."""
    return view_line(site.operands[0].shape, site.results[0].shape)


def new(site: Site) -> str:
    """A tensor filled with a constant, made from another's dtype and device."""
    return f"{term(site.rank, range(site.rank))} -> ..."


def along(position: int, name: str, default: Any = None, solid: bool = False) -> LineMaker:
    """Each dim on its own but for those of an argument, which stay whole (softmax, cumsum, sort, amax, split, ...).

    `solid`: the op can't run on nothing.
    """

    def line(site: Site) -> str:
        fixed = site.dims(position, name, default)
        kept = [term(site.rank, fixed, fixed if len(r.shape) < site.rank else ()) for r in site.results]
        return (
            f"{', '.join([term(site.rank, fixed)] * len(site.operands))} -> {', '.join(kept)} | {_solid(site, solid)}"
        )

    return line


def _solid(site: Site, needed: bool = True) -> str:
    """Notes that every dim is solid, if needed."""
    return ", ".join(f"d{d}!" for d in range(site.rank) if needed)


def sliced(site: Site) -> str | None:
    """A slice keeps its dim whole unless it takes all of it."""
    same = site.operands[0].shape == site.results[0].shape and site.argument(4, "step", 1) == 1
    return pointwise(site) if same else along(1, "dim", 0)(site)


def summed(kernel: str = "") -> LineMaker:
    """Sum or mean over dims: a split of a reduced dim leaves a partial result; `kernel` runs it."""

    def line(site: Site) -> str:
        reduced = sorted(site.dims(1, "dim"))
        kept = term(site.rank, reduced, reduced if len(site.results[0].shape) < site.rank else ())
        notes = ", ".join(f"d{d}: {kernel}" for d in reduced if kernel)
        return f"{term(site.rank)} -> {kept} | {notes}"

    return line


def transpose(site: Site) -> str:
    """Two dims change places; `t` and `mT` swap the last two."""
    order = list(range(site.rank))
    if order[1:]:
        first, second = int(site.argument(1, "dim0", -2)), int(site.argument(2, "dim1", -1))
        order[first], order[second] = order[second], order[first]
    return permuted(order)


def permute(site: Site) -> str:
    """Result dim i is operand dim `dims[i]`."""
    return permuted([int(d) % site.rank for d in site.argument(1, "dims")])


def permuted(order: Sequence[int]) -> str:
    """Line of a tensor whose dims are put in `order`."""
    return f"{term(len(order))} -> {' '.join(f'd{d}' for d in order)}"


def cat(site: Site) -> str:
    """Tensors joined along a dim, which stays whole."""
    fixed = site.dims(1, "dim", 0)
    return f"{', '.join(term(len(s.shape), fixed) for s in site.operands)} -> {term(site.rank, fixed)}"


def stack(site: Site) -> str:
    """Tensors joined along a new dim."""
    new_dim = int(site.argument(1, "dim", 0)) % (site.rank + 1)
    result = [f"d{d}" for d in range(site.rank)]
    result.insert(new_dim, "_")
    return f"{', '.join([term(site.rank)] * len(site.operands))} -> {' '.join(result)}"


def pad(site: Site) -> str:
    """Padded dims stay whole; `pad` lists pairs from the last dim backwards."""
    amounts = site.argument(1, "pad")
    fixed = {site.rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    return f"{term(site.rank, fixed)} -> {term(site.rank, fixed)}"


def matmul(site: Site) -> str:
    """Matrix product with broadcast batch dims, or with vectors."""
    left = "k" if site.rank == 1 else "... m k"
    right = "k" if len(site.operands[1].shape) == 1 else "... k n"
    batch = "... " if "..." in left + right else ""
    rows, columns = "m " * ("m" in left), "n" * ("n" in right)
    return f"{left}, {right} -> {batch}{rows}{columns}"


def einsum(site: Site) -> str | None:
    """The equation is the rule; None with a repeated index in one term."""
    equation = str(site.argument(0, "equation")).replace(" ", "")
    if "->" not in equation:
        _, made = terms_of(equation, [len(spec.shape) for spec in site.operands])
        equation += "->" + "..." * ("." in equation) + "".join(label for label in made if label.isalpha())
    equation = equation.replace("...", ".")
    if any(t.count(c) > 1 for t in equation.replace("->", ",").split(",") for c in t):
        return None
    sides = [", ".join(" ".join(t).replace(".", "...") for t in side.split(",")) for side in equation.split("->")]
    return " -> ".join(sides)


def convolution(site: Site) -> str | None:
    """Convolution over whole images: batch, input and output channels, the batch alone where grouped."""
    return _convolved(site, "o i")


def transposed_convolution(site: Site) -> str | None:
    """As `convolution`, with input channels first in the weight."""
    return _convolved(site, "i o")


def _convolved(site: Site, channels: str) -> str | None:
    if site.rank != len(site.operands[1].shape):  # a single image
        return None
    space = "_ " * (site.rank - 2)
    if site.argument(6, "groups", 1) != 1:
        return f"b _ {space}, _ _ {space}, _ -> b _ {space}"
    return f"b i {space}, {channels} {space}, + o -> b o {space} | i!, o!"


def spatial(dims: int) -> LineMaker:
    """Pooling, padding and resizing of whole images of so many dims, one by one."""

    def line(site: Site) -> str:
        image, channels = f"... {'_ ' * dims}", max(0, site.rank - dims - 1)
        return f"{image} -> {', '.join([image] * len(site.results))} | d{channels}!"

    return line


def batch_norm(site: Site) -> str:
    """Samples and channels; in training the kernel takes statistics over all samples. Images stay whole there."""
    training = site.argument(5, "training", False)
    image = "_ " * (site.rank - 2) if training else "..."
    results = [f"b c {image}", *["c"] * (len(site.results) - 1)]
    note = "b: batch_norm whole" if training else ""
    return f"b c {image}, c, c, c, c -> {', '.join(results)} | {note}"


def group_norm(site: Site) -> str:
    """Samples only: groups of channels are told by their number."""
    image = "_ " * (site.rank - 1)
    return f"b {image}, _, _ -> b {image}"


def instance_norm(site: Site) -> str | None:
    """Samples and channels, each on its own; None with running statistics, which are means over samples."""
    if isinstance(site.argument(3, "running_mean"), Ref):
        return None
    space = "_ " * (site.rank - 2)
    return f"b c {space}, c, c -> b c {space} | b!, c!"


def normalised(site: Site) -> str:
    """Layer norm and RMS norm: the normalised dims stay whole."""
    whole = "_ " * len(site.argument(1, "normalized_shape"))
    kept = ", ".join([f"... {whole}"] * len(site.results))
    return f"... {whole}, {whole}, {whole} -> {kept}"


def attention(site: Site) -> str:
    """Scaled dot product attention: batch, heads (grouped: what both counts share) and queries.

    Causal queries see keys up to their own place, so a kernel needs to know where a rank's queries begin.
    """
    if not site.argument(5, "is_causal", False):
        return "... q _, ... _ _, ... _ _, ... q _ -> ... q _"
    query, note = "_", ""
    if site.operands[0].shape[-2] == site.operands[1].shape[-2]:
        query, note = "q", " | q: causal_attention, q!"
    return f"... {query} _, ... _ _, ... _ _, ... {query} _ -> ... {query} _{note}"


def embedding(site: Site) -> str | None:
    """Rows of a table; None where the gradient counts indices over all ranks."""
    if site.argument(3, "scale_grad_by_freq", False) or site.argument(4, "sparse", False):
        return None
    return "v d, ... -> ... d | v: embedding_rows"


def dropout(site: Site) -> str:
    """Masks come from the global element index, so the kernel runs even where nothing is split."""
    active = site.argument(1, "p", 0.5) and site.argument(2, "train", True)
    note = "*: dropout" if active else _solid(site, len(site.results) > 1)  # whose mask of nothing has another dtype
    return f"... -> {', '.join(['...'] * len(site.results))} | {note}"


def constant(site: Site) -> str:
    """A tensor whose elements depend on their place: never split."""
    return f"-> {term(len(site.results[0].shape), range(len(site.results[0].shape)))}"


def prelu(site: Site) -> str:
    """A slope for each channel (dim 1), or one for all."""
    if str(site.operands[1].shape[0] if site.operands[1].shape else 1) == "1":
        return "..., _ -> ..." if site.operands[1].shape else "..., -> ..."
    return f"{term(site.rank)}, d1 -> {term(site.rank)}"


def movedim(site: Site) -> str:
    """Dims `source` of the operand become dims `destination` of the result; the others keep their order."""
    source, target = (_dims(site.argument(i, n), site.rank) for i, n in ((1, "source"), (2, "destination")))
    rest = iter(d for d in range(site.rank) if d not in source)
    place = dict(zip(target, source, strict=True))
    return permuted([place[d] if d in place else next(rest) for d in range(site.rank)])


def _dims(given: Any, rank: int) -> list[int]:
    return [int(d) % rank for d in (given if isinstance(given, tuple) else (given,))]


def grid_sampler(site: Site) -> str:
    """Images read at places of their own."""
    image = "_ " * (site.rank - 2)
    return f"b c {image}, b {image} _ -> b c {image}"


def weight_norm(site: Site) -> str | None:
    """Weights scaled to the lengths in the second operand: slices along a dim are each on their own.

    None where there is one length for all, which torch writes as dim -1.
    """
    dim = int(site.argument(2, "dim", 0))
    if dim < 0:
        return None
    whole = term(site.rank, {*range(site.rank)} - {dim})
    return f"{whole}, {whole} -> {whole} | d{dim}!"


def recurrent(site: Site) -> str:
    """Recurrent layers over whole sequences: samples alone. Operands: input, states, weights."""
    states = len(site.argument(1, "hx")) if isinstance(site.argument(1, "hx"), tuple) else 1
    first = bool(site.op.args[-1])
    sequence = ("b _ _" if first else "_ b _") if site.rank == 3 else "_ _"
    state = "_ b _" if site.rank == 3 else "_ _"
    weights = ["_ " * len(s.shape) for s in site.operands[1 + states :]]
    results = [sequence, *[state] * (len(site.results) - 1)]
    return f"{', '.join([sequence, *[state] * states, *weights])} -> {', '.join(results)}"


def opaque(site: Site) -> str | None:
    """A submodule as one operator: samples, if it keeps them apart."""
    if not form_of(site.op.args[1]).apart:
        return None
    sides = [", ".join(_samples(spec) for spec in side) for side in (site.operands, site.results)]
    return " -> ".join(sides)


def _samples(spec: TensorSpec) -> str:
    return " ".join("b" if d == spec.batch_dim else "_" for d in range(len(spec.shape)))
