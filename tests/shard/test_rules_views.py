"""Factors of reshapes: exactly those splits that keep shards together, at every batch."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.graph import Extent, TensorSpec
from autopar.shard.factors import OpRule
from autopar.shard.notation import bind, parse
from autopar.shard.views import view_line
from tests.examples import examples


def _rule(source: tuple[Extent, ...], target: tuple[Extent, ...]) -> OpRule:
    rule = bind(parse(view_line(source, target)), (TensorSpec(source, "float32"),), (TensorSpec(target, "float32"),))
    assert rule is not None
    return rule


def _offered(source: tuple[int, ...], target: tuple[int, ...], ways: int) -> set[tuple[int, int]]:
    rule = _rule(tuple(Extent(0, n) for n in source), tuple(Extent(0, n) for n in target))
    legal = [f.name for f in rule.factors if f.extent.fixed % ways == 0]
    return {(rule.operands[0].index(f), rule.results[0].index(f)) for f in legal}


def _legal(source: tuple[int, ...], target: tuple[int, ...], ways: int) -> set[tuple[int, int]]:
    """By trial: the pairs of dims such that reshaping each shard gives the shard of the reshaped."""
    whole = np.arange(prod(source)).reshape(source)
    found = set()
    for i, n in enumerate(source):
        for j, m in enumerate(target):
            if n % ways or m % ways:
                continue
            pieces = zip(np.split(whole, ways, i), np.split(whole.reshape(target), ways, j), strict=True)
            if all((before.ravel() == after.ravel()).all() for before, after in pieces):
                found.add((i, j))
    return found


_shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


@given(source=_shapes, target=_shapes, ways=st.sampled_from([2, 3, 4]))
@examples(400)
def test_offers_all_legal_splits_and_no_other(source: tuple[int, ...], target: tuple[int, ...], ways: int) -> None:
    """For any two shapes of equal size the offered dim pairs are those found by trying every pair."""
    filled = (*target, prod(source) // prod(target)) if prod(source) % prod(target) == 0 else target
    assume(prod(filled) == prod(source))
    assert _offered(source, filled, ways) == _legal(source, filled, ways)


B = Extent(1)


def _fixed(*lengths: int) -> tuple[Extent, ...]:
    return tuple(Extent(0, n) for n in lengths)


@pytest.mark.parametrize(
    ("source", "target", "line", "extents"),
    [
        ((B, *_fixed(8, 96)), (B, *_fixed(8, 12, 8)), "d0 d1 d2 -> d0 d1 d2 _", (B, *_fixed(8, 12))),
        ((B, *_fixed(8, 12, 8)), (B, *_fixed(8, 96)), "d0 d1 d2 _ -> d0 d1 d2", (B, *_fixed(8, 12))),
        ((B, *_fixed(8, 96)), (Extent(8), *_fixed(96)), "d0 _ d2 -> d0 d2", (B, *_fixed(96))),
        ((Extent(8), *_fixed(96)), (B, *_fixed(8, 96)), "d0 d1 -> d0 _ d1", (B, *_fixed(96))),
        ((B, *_fixed(4, 6)), (*_fixed(1), B, *_fixed(24)), "d0 d1 _ -> _ d0 d1", (B, *_fixed(4))),
        ((*_fixed(4), B), (B, *_fixed(4)), "d0 _ -> d0 _", ()),
        ((Extent(6),), (Extent(2), *_fixed(3)), "d0 -> d0 _", (Extent(2),)),
    ],
)
def test_symbolic_batch(
    source: tuple[Extent, ...], target: tuple[Extent, ...], line: str, extents: tuple[Extent, ...]
) -> None:
    """Splitting and merging dims around a batch of unknown size shares the outer dim only."""
    assert view_line(source, target) == line
    assert tuple(f.extent for f in _rule(source, target).factors) == extents
