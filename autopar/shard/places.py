"""Lines of ops that read or write places along dims: indices, slices, windows, copies, diagonals."""

from __future__ import annotations

from autopar.graph import Ref
from autopar.shard.structured import Site, term


def index(site: Site) -> str | None:
    """`x[i, j, ...]`: indexed dims stay whole, index dims take their place (in front when they are not neighbours)."""
    places = [d for d, i in enumerate(site.argument(1, "indices")) if isinstance(i, Ref)]
    if any(spec.dtype == "bool" for spec in site.operands[1:]):
        return None
    width = max(len(spec.shape) for spec in site.operands[1:])
    kept = [f"x{d}" for d in range(site.rank) if d not in places]
    at = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    kept[at:at] = [f"i{d}" for d in range(width)]
    source = " ".join("_" if d in places else f"x{d}" for d in range(site.rank))
    spots = [" ".join(f"i{width - len(s.shape) + d}" for d in range(len(s.shape))) for s in site.operands[1:]]
    return f"{source}, {', '.join(spots)} -> {' '.join(kept)}"


def index_select(site: Site) -> str:
    """Slices of one dim picked by a vector of indices."""
    (dim,) = site.dims(1, "dim")
    before, after = " ".join(f"x{d}" for d in range(dim)), " ".join(f"x{d}" for d in range(dim + 1, site.rank))
    return f"{before} _ {after}, i -> {before} i {after}"


def gather(site: Site) -> str:
    """Elements picked along a dim; other dims are shared where the index does not cut them short."""
    (dim,) = site.dims(1, "dim")
    source, picks = site.operands
    short = {d for d in range(site.rank) if source.shape[d] != picks.shape[d]} - {dim}
    return f"{term(site.rank, short | {dim})}, {term(site.rank, short)} -> {term(site.rank, short)}"


def slice_scatter(site: Site) -> str:
    """A slice of the first tensor replaced: its dim stays whole."""
    whole = term(site.rank, site.dims(2, "dim", 0))
    return f"{whole}, {whole} -> {whole}"


def select_scatter(site: Site) -> str:
    """One place along a dim replaced: that dim stays whole."""
    fixed = site.dims(2, "dim")
    return f"{term(site.rank, fixed)}, {term(site.rank, fixed, fixed)} -> {term(site.rank, fixed)}"


def repeat(site: Site) -> str | None:
    """Copies side by side: dims that aren't repeated can be split."""
    times = site.argument(1, "repeats") if "repeat" in site.op.target else site.argument(1, "dims")
    new = len(times) - site.rank
    if new < 0:
        return None
    kept = [f"d{d}" if times[new + d] == 1 else "_" for d in range(site.rank)]
    return f"{' '.join(kept)} -> {'_ ' * new}{' '.join(kept)}"


def repeat_interleave(site: Site) -> str | None:
    """Each place along a dim repeated a number of times; None where the result is flattened or of unknown length."""
    dim = site.argument(2, "dim")
    if dim is None or len(site.operands) > 1:
        return None
    fixed = site.dims(2, "dim")
    return f"{term(site.rank, fixed)} -> {term(site.rank, fixed)}"


def unfold(site: Site) -> str:
    """Windows along a dim, which become the last dim."""
    fixed = site.dims(1, "dimension")
    return f"{term(site.rank, fixed)} -> {term(site.rank, fixed)} _"


def scatter(site: Site) -> str:
    """Elements put, or added, at places along a dim; other dims are shared where the index has all of them."""
    fixed = site.dims(1, "dim")
    picks = site.operands[1].shape
    short = {d for d in range(site.rank) if any(s.shape[d] != picks[d] for s in site.operands)} | fixed
    others = [term(site.rank, short)] * len(site.operands)
    return f"{', '.join(others)} -> {term(site.rank, short)}"


def index_add(site: Site) -> str:
    """Slices added at, or put in, places along a dim, which stays whole."""
    fixed = site.dims(1, "dim")
    whole = term(site.rank, fixed)
    return f"{whole}, _, {whole} -> {whole}"


def index_fill(site: Site) -> str:
    """Places along a dim, which stays whole, filled with a value."""
    whole = term(site.rank, site.dims(1, "dim"))
    return f"{', '.join([whole, '_', ''][: len(site.operands)])} -> {whole}"


def diagonal(site: Site) -> str:
    """Two dims become their diagonal, the last dim."""
    fixed = {*site.dims(2, "dim1", 0), *site.dims(3, "dim2", 1)}
    return f"{term(site.rank, fixed)} -> {term(site.rank, dropped=fixed)} _"


def diag_embed(site: Site) -> str | None:
    """The last dim becomes the diagonal of the last two; None where others are asked for."""
    if {int(site.argument(i, n, d)) % (site.rank + 1) for i, n, d in ((2, "dim1", -2), (3, "dim2", -1))} != {
        site.rank - 1, site.rank,
    }:  # fmt: skip
        return None
    return f"{term(site.rank, {site.rank - 1})} -> {term(site.rank, {site.rank - 1})} _"
