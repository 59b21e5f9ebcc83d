"""The layouts a value may have at a cut between layers, and wherever else several consumers share it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from autopar.graph import REPLICATE, Layout, TensorSpec, is_dealt


def dealt(spec: TensorSpec, layout: Layout, sizes: tuple[int, ...], batch: int) -> bool:
    """Whether every dim that `layout` splits has something for each rank at `batch` samples."""
    ways: dict[int, int] = {}
    for placement, size in zip(layout, sizes, strict=True):
        if placement >= 0:
            ways[placement] = ways.get(placement, 1) * size
    return all(spec.shape[d].at(batch) >= n and is_dealt(spec.shape[d], batch, n) for d, n in ways.items())


def combine(
    spec: TensorSpec, placements: Iterable[Iterable[int]], sizes: tuple[int, ...], batch: int
) -> tuple[Layout, ...]:
    """All layouts that take one of `placements[axis]` on each axis and leave no rank out, in a fixed order."""
    per_axis = [sorted(set(p), key=lambda x: (x < 0, x)) for p in placements]
    return tuple(layout for layout in product(*per_axis) if dealt(spec, layout, sizes, batch))


def cut_layouts(spec: TensorSpec, sizes: tuple[int, ...], batch: int, inner: bool) -> tuple[Layout, ...]:
    """Layouts of the main value at a cut: each axis splits a dim or none.

    At the model's ends (`inner` False) only the batch may be split: that is how inputs come and results go.
    """
    dims = range(len(spec.shape)) if inner else [d for d in (spec.batch_dim,) if d is not None]
    return combine(spec, [[*dims, REPLICATE]] * len(sizes), sizes, batch)
