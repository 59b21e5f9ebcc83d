from __future__ import annotations

import time

import numpy as np
import pytest

from autopar.cost.roofline import RAMPS, RooflinePricer, gemm_fill
from autopar.errors import ConfigError
from autopar.graph import Operand, OpKey
from tests.cost.small import cluster


def matrix(*shape: int, dtype: str = "float32", grad: bool = True) -> Operand:
    return Operand(shape, dtype, grad)


def test_large_product_is_limited_by_compute() -> None:
    """4096^3 at 1 TFLOP/s: 0.137 s over the fill of 1024 tiles and k = 4096, and a launch of 1 us; twice back."""
    fill = 1024 / 1034 * 4096 / 4246
    times = RooflinePricer(cluster()).ops([OpKey("aten.linear.default", (matrix(4096, 4096), matrix(4096, 4096)))])
    assert times.forward_s[0] == pytest.approx(2 * 4096**3 / 1e12 / fill + 1e-6)
    assert times.backward_s[0] == pytest.approx(2 * (times.forward_s[0]))
    assert times.sources == ["roofline"]


def test_pointwise_is_limited_by_bytes() -> None:
    """gelu reads and writes 4 MB at half of 100 GB/s."""
    times = RooflinePricer(cluster()).ops([OpKey("aten.gelu.default", (matrix(1000, 1000, grad=False),))])
    assert times.forward_s[0] == pytest.approx(8e6 / 5e10 + 1e-6)
    assert times.backward_s[0] == 0


def test_views_take_no_time() -> None:
    """Metadata only."""
    times = RooflinePricer(cluster()).ops([OpKey("aten.transpose.int", (matrix(8, 8), 0, 1))])
    assert (times.forward_s[0], times.backward_s[0]) == (0, 0)


def test_fill_grows_with_size_and_stays_below_one() -> None:
    """Products of multiples of the tile fill better the larger they are."""
    n = np.array([128.0, 512.0, 2048.0, 8192.0])
    one = np.ones(4)
    for ramp in RAMPS.values():
        fill = gemm_fill(one, n, n, n, ramp)
        assert (np.diff(fill) > 0).all()
        assert (fill < 1).all()


def test_unknown_dtype_is_named() -> None:
    """A device without a figure for a dtype refuses to price its products, naming what it has."""
    key = OpKey("aten.mm.default", (matrix(8, 8, dtype="float64"), matrix(8, 8, dtype="float64")))
    with pytest.raises(ConfigError, match=r"'round'.*float64.*bfloat16, float32"):
        RooflinePricer(cluster()).ops([key])


def test_no_keys_no_times() -> None:
    """An empty question has an empty answer."""
    assert RooflinePricer(cluster()).ops([]).forward_s.shape == (0,)


def test_hundred_thousand_keys_are_priced_quickly() -> None:
    """Fast enough for the search: 20,000 distinct keys in well under a second of CPU time."""
    keys = [OpKey("aten.linear.default", (matrix(m, 1024), matrix(4096, 1024))) for m in range(1, 20_001)]
    start = time.process_time()
    RooflinePricer(cluster()).ops(keys)
    assert time.process_time() - start < 1.0
