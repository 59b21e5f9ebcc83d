"""Ranks of a mesh simulated in one process: what each would hold of a whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from autopar.graph import PARTIAL, Extent, Layout, axes_of, part_of

Rank = tuple[int, ...]
"""Coordinates on the mesh, one per axis."""


def ranks(sizes: tuple[int, ...]) -> Iterator[Rank]:
    """Coordinates of all ranks of a mesh."""
    return product(*map(range, sizes))


@dataclass(frozen=True)
class Pieces:
    """What a tensor may be cut into at `batch` samples: `extents[d]` counts the pieces of dim d."""

    extents: tuple[Extent, ...]
    batch: int = 1


def shard_of(whole: Tensor, pieces: Pieces, layout: Layout, sizes: tuple[int, ...], rank: Rank) -> Tensor:
    """What `rank` holds of `whole`, partial axes left out."""
    for dim, extent in enumerate(pieces.extents):
        if axes := axes_of(layout, dim):
            first, length = part_of(extent, pieces.batch, [sizes[a] for a in axes], [rank[a] for a in axes])
            grain = whole.shape[dim] // extent.at(pieces.batch)
            whole = whole.narrow(dim, first * grain, length * grain)
    return whole


def distribute(
    whole: Tensor, pieces: Pieces, layout: Layout, sizes: tuple[int, ...], generator: torch.Generator
) -> dict[Rank, Tensor]:
    """Fresh leaves that make up `whole`; along partial axes it is cut into random summands."""
    partial = [a for a, p in enumerate(layout) if p == PARTIAL]
    shares = list(ranks(tuple(sizes[a] for a in partial)))
    parts = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in shares[1:]]
    parts.append(whole - sum(parts) if parts else whole)
    by_share = dict(zip(shares, parts, strict=True))
    return {
        rank: shard_of(by_share[tuple(rank[a] for a in partial)], pieces, layout, sizes, rank).detach().clone()
        for rank in ranks(sizes)
    }


def agrees(
    shards: dict[Rank, Tensor], whole: Tensor, pieces: Pieces, layout: Layout, sizes: tuple[int, ...], tolerance: float
) -> bool:
    """Whether shards, summed over the partial axes, are what `layout` says of `whole`.

    `tolerance` is relative to the largest element of `whole`, or to 1.
    """
    rounded = (whole.is_floating_point() or whole.is_complex()) and whole.numel()
    allowed = tolerance * max(float(whole.nan_to_num().abs().max()), 1.0) if rounded else 0.0
    for rank in ranks(sizes):
        held = [shards[r] for r in _summands(rank, layout, sizes)]
        wanted = shard_of(whole, pieces, layout, sizes, rank)
        if any(h.shape != wanted.shape or h.dtype != wanted.dtype for h in held):
            return False
        total = torch.stack(held).sum(0) if len(held) > 1 else held[0]
        if not torch.allclose(total, wanted, rtol=0.0, atol=allowed, equal_nan=True):
            return False
    return True


def _summands(rank: Rank, layout: Layout, sizes: tuple[int, ...]) -> Iterator[Rank]:
    """The ranks that differ from `rank` on partial axes only."""
    return product(*(range(n) if p == PARTIAL else (c,) for c, p, n in zip(rank, layout, sizes, strict=True)))
