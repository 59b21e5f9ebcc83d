from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.measure.fit import Curve, spread


def test_curve_goes_through_its_points() -> None:
    """At the points the measured seconds; halfway in logarithm their geometric mean."""
    curve = Curve.through([1e-6, 1e-4], [2e-6, 8e-4])
    seconds, inside = curve.at(np.array([1e-6, 1e-5, 1e-4]))
    assert seconds == pytest.approx([2e-6, 4e-5, 8e-4])
    assert inside.all()


def test_beyond_its_points() -> None:
    """Larger grows in proportion, smaller stays; both count as outside."""
    seconds, inside = Curve.through([1e-6, 1e-4], [2e-6, 8e-4]).at(np.array([1e-8, 1e-2]))
    assert seconds == pytest.approx([2e-6, 8e-2])
    assert not inside.any()


def test_points_of_one_size_are_averaged() -> None:
    """Views have no predicted time: their timings make one point."""
    seconds, inside = Curve.through([0.0, 0.0], [1e-6, 4e-6]).at(np.array([0.0]))
    assert seconds == pytest.approx([2e-6])
    assert inside.all()


@given(st.lists(st.floats(1e-7, 1e2), min_size=1, max_size=20), st.integers(2, 6))
def test_spread_takes_the_ends(values: list[float], count: int) -> None:
    """At most `count` of them, the smallest and the largest always."""
    chosen = [values[i] for i in spread(values, count)]
    assert len(chosen) <= count
    assert min(chosen) == pytest.approx(min(values))
    assert max(chosen) == pytest.approx(max(values))
