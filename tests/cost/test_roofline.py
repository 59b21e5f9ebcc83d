from __future__ import annotations

import time

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer, flop_rate, model_of
from autopar.cost.work import work
from autopar.errors import ConfigError
from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.measure.models.gemm import gemm_sizes
from tests.cost.small import cluster


def matrix(*shape: int, dtype: str = "float32", grad: bool = True) -> Operand:
    return Operand(shape, dtype, grad)


def test_large_product_is_limited_by_compute() -> None:
    """4096^3 at 1 TFLOP/s, no constants known: 512 tiles of 256 x 128 on 100 units; once forward, twice backward."""
    waves = 0.73 * 5.12 + 0.27 * 6
    computing = waves * 100 * 256 * 128 * 2 * (4096 + 100) / 1e12 * (2 * 4096**3 / 1e11) ** 0.01
    moving = 3 * 4096**2 * 4 / (0.5 * 1e11)
    times = RooflinePricer(cluster()).ops([OpKey("aten.linear.default", (matrix(4096, 4096), matrix(4096, 4096)))])
    assert times.forward_s[0] == pytest.approx((computing**4 + moving**4) ** 0.25 + 1e-6)
    assert times.backward_s[0] == pytest.approx(2 * times.forward_s[0])
    assert times.sources == ["roofline"]


def test_pointwise_is_limited_by_bytes() -> None:
    """gelu reads and writes 4 MB at half of 100 GB/s, half as fast again for the part that the cache holds."""
    times = RooflinePricer(cluster()).ops([OpKey("aten.gelu.default", (matrix(1000, 1000, grad=False),))])
    cached = 1 / (1 + (8e6 / (30 * 2**20)) ** 2)
    assert times.forward_s[0] == pytest.approx(8e6 / 5e10 * (1 - cached / 3) + 1e-6)
    assert times.backward_s[0] == 0


def test_fitted_devices_say_so() -> None:
    """On a device with published timings products, attention and collectives inside a node are priced as fitted."""
    where = load_cluster("2x8xa100-80gb")
    q = matrix(4, 16, 1024, 128, dtype="bfloat16")
    keys = [
        OpKey("aten.linear.default", (matrix(4096, 4096, dtype="bfloat16"), matrix(4096, 4096, dtype="bfloat16"))),
        OpKey("aten.scaled_dot_product_attention.default", (q, q, q)),
    ]
    assert RooflinePricer(where).ops(keys).sources == ["fitted", "fitted"]
    moves = [CollectiveKey("all_reduce", 2**24, 8), CollectiveKey("all_reduce", 2**24, 16)]
    assert RooflinePricer(where).collectives(moves).sources == ["fitted", "roofline"]


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb", "b200-180gb", "l40s-48gb", "rtx4090-24gb"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_work_is_faster_than_the_stated_rate(name: str, dtype: str) -> None:
    """The rate that bounds pipelines from below is above that of every product and attention, small and large."""
    where = load_cluster(f"1x{name}")
    rng = np.random.default_rng(0)
    keys = []
    for _ in range(300):
        m, n, k = (int(2 ** rng.uniform(4, 15)) for _ in range(3))
        keys.append(OpKey("aten.linear.default", (matrix(m, k, dtype=dtype), matrix(n, k, dtype=dtype))))
        q = matrix(
            int(rng.integers(1, 9)), int(rng.integers(1, 33)), m, int(rng.choice([64, 96, 128, 256])), dtype=dtype
        )
        keys.append(OpKey("aten.scaled_dot_product_attention.default", (q, q, q, None, 0.0, bool(rng.integers(2)))))
    times, rate = RooflinePricer(where).ops(keys), flop_rate(where.device, dtype)
    flops = np.array([work(key).forward.flops for key in keys])
    assert (flops <= times.forward_s * rate).all()


def test_views_take_no_time() -> None:
    """Metadata only."""
    times = RooflinePricer(cluster()).ops([OpKey("aten.transpose.int", (matrix(8, 8), 0, 1))])
    assert (times.forward_s[0], times.backward_s[0]) == (0, 0)


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


def test_half_a_million_products_a_second() -> None:
    """The form itself, over columns of sizes, keeps up with the search: 500,000 products in a second of CPU time."""
    model = model_of(load_cluster("1xa100-80gb").device)
    m = np.random.default_rng(0).integers(1, 8192, 500_000).astype(np.float64)
    start = time.process_time()
    seconds = model.seconds("gemm", gemm_sizes(m, m[::-1], 4 * m, np.ones_like(m), 2), "bfloat16")
    assert time.process_time() - start < 1.0
    assert (seconds > 0).all()
