"""On a real device: 200 operators timed in under four minutes, a quarter of them held out and predicted by the others.

pytest tests/gpu/test_operators.py -s          # prints what python -m benchmarks.local_ops --device cuda does
"""

from __future__ import annotations

import pytest

from autopar.accelerator import runtime
from autopar.ranks import local_device
from benchmarks.local_ops import lines, measure

POINTS, MOST_S = 200, 240.0


@pytest.mark.gpu
@pytest.mark.skipif(not runtime().is_available(), reason="no device that torch can use")
def test_two_hundred_points() -> None:
    """All points run, in less than four minutes; the errors of those held out are printed."""
    found = measure(POINTS, local_device())
    print("\n" + "\n".join(lines(found)))
    assert found["failed"] == []
    assert found["seconds"] < MOST_S
