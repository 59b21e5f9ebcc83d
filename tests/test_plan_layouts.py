"""Layouts over prime factors of mesh axes."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from autopar.graph import Extent, Layout, TensorSpec, local_shape
from autopar.plan import expanded, prime_sizes


def _shard(layout: Layout, sizes: tuple[int, ...], rank: int) -> tuple[tuple[int, int], ...]:
    """(start, length) in both dims of a 1728 x 1728 tensor for a rank, row-major, first axis outermost on each dim."""
    box = [(0, 1728), (0, 1728)]
    for axis, (placement, size) in enumerate(zip(layout, sizes, strict=True)):
        index = rank // prod(sizes[axis + 1 :]) % size
        if placement >= 0:
            start, length = box[placement]
            box[placement] = (start + index * (length // size), length // size)
    return tuple(box)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([-1, 0, 1])), min_size=1, max_size=3))
def test_expansion_keeps_every_shard(axes: list[tuple[int, int]]) -> None:
    """Every position holds the same rows and columns under a layout and its expansion."""
    sizes, layout = tuple(a for a, _ in axes), tuple(p for _, p in axes)
    fine, primes = expanded(layout, sizes), prime_sizes(sizes)
    assert len(fine) == len(primes)
    assert prod(primes) == prod(sizes)
    for rank in range(prod(sizes)):
        assert _shard(layout, sizes, rank) == _shard(fine, primes, rank)
    square = TensorSpec((Extent(0, 1728), Extent(0, 1728)), "float32")
    assert local_shape(square, 1, fine, primes) == local_shape(square, 1, layout, sizes)


def test_other_meshes_of_as_many_devices_compare() -> None:
    """(4, 2) split on the outer axis is (2, 2, 2) split on the first two, and not (2, 4) split on the outer."""
    assert expanded((0, -1), (4, 2)) == expanded((0, 0, -1), (2, 2, 2)) == (0, 0, -1)
    assert expanded((0, -1), (2, 4)) == (0, -1, -1)
