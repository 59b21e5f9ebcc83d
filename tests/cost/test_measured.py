from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import load_cluster
from autopar.cost.measured import MeasuredPricer
from autopar.cost.roofline import RooflinePricer
from autopar.cost.sampling import HEAVY_LIMIT, POINTS, collectives_to_time, ops_to_time
from autopar.errors import ProfileError
from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.measure.hiding import overlap_keys
from autopar.measure.keys import Key
from autopar.measure.profile import Environment, Profile, Sample, Timing
from autopar.measure.store import Store
from tests.cost.small import cluster

HERE = Environment("round", "cuda", "2.13.0", 1, 1)
ROOFLINE = RooflinePricer(cluster())


def product(n: int) -> OpKey:
    return OpKey("aten.mm.default", (Operand((n, n), "float32", True),) * 2)


def gelu(n: int) -> OpKey:
    return OpKey("aten.gelu.default", (Operand((n,), "float32", True),))


class Doubling:
    """A session on a machine that takes exactly twice (backward: three times) the roofline's seconds."""

    environment = HERE

    def __init__(self) -> None:
        self.asked: list[OpKey] = []

    def ops(self, keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        self.asked += keys
        found = ROOFLINE.ops(keys)
        return {
            key: Timing(Sample((2 * forward_s,)), Sample((3 * backward_s,)))
            for key, forward_s, backward_s in zip(
                keys, found.forward_s.tolist(), found.backward_s.tolist(), strict=True
            )
        }

    def collectives(self, keys: Sequence[CollectiveKey]) -> dict[CollectiveKey, Timing]:
        return {key: Timing(Sample((key.bytes * 1e-9 + 1e-4,))) for key in keys}


def pricer(tmp_path: Path, session: Doubling | None) -> MeasuredPricer:
    if session is None:
        return MeasuredPricer(Profile(HERE, {}), ROOFLINE)
    return MeasuredPricer.on_this_machine(ROOFLINE, session, Store(tmp_path / "store"))


def test_nothing_timed_is_the_fallback() -> None:
    """Without timings and session the roofline's seconds come out, under its name."""
    found = pricer(Path(), None).ops([product(64), gelu(1000)])
    assert found.forward_s.tolist() == ROOFLINE.ops([product(64), gelu(1000)]).forward_s.tolist()
    assert found.sources == ["roofline", "roofline"]


def test_heavy_ops_are_timed_and_light_ones_fitted(tmp_path: Path) -> None:
    """Products are exact; of thirty sizes of gelu a few are timed, and the rest lies on the curve through them."""
    keys = [product(n) for n in (64, 128, 256)] + [gelu(1000 * n) for n in range(1, 31)]
    session = Doubling()
    found = pricer(tmp_path, session).ops(keys)
    expected = ROOFLINE.ops(keys)
    assert found.forward_s == pytest.approx(2 * expected.forward_s, rel=0.02)
    assert found.backward_s == pytest.approx(3 * expected.backward_s, rel=0.02)
    assert found.sources[:3] == ["measured"] * 3
    assert sorted(set(found.sources[3:])) == ["fitted", "measured"]
    sizes = {key for key in session.asked if key not in keys[:3]}
    assert {gelu(1000), gelu(30_000)} < sizes
    assert len(sizes) == 3


def test_sizes_beyond_those_timed_are_timed_when_asked_for(tmp_path: Path) -> None:
    """However many sizes of a light op are known, one far outside of them is not extrapolated."""
    one = pricer(tmp_path, Doubling())
    one.ops([gelu(n) for n in (10, 100, 1000, 10**4)])
    assert one.ops([gelu(10**7), gelu(9 * 10**3)]).sources == ["measured", "fitted"]


def test_second_run_times_nothing(tmp_path: Path) -> None:
    """What the store knows isn't taken again."""
    pricer(tmp_path, Doubling()).ops([product(64), gelu(1000)])
    again = Doubling()
    found = pricer(tmp_path, again).ops([product(64), gelu(1000)])
    assert again.asked == []
    assert found.sources == ["measured", "measured"]


def test_prices_stay_while_the_pricer_lives(tmp_path: Path) -> None:
    """New timings of a kind don't change what was already said."""
    one = pricer(tmp_path, Doubling())
    first = one.ops([gelu(1000)]).forward_s[0]
    one.ops([gelu(n) for n in (10, 10**4, 10**5, 10**6, 990)])
    assert one.ops([gelu(1000)]).forward_s[0] == first


def test_beyond_the_timed_sizes_is_extrapolated(tmp_path: Path) -> None:
    """A profile of small sizes prices a large one in proportion, and says so."""
    pricer(tmp_path, Doubling()).ops([gelu(10**6), gelu(10**5)])
    profile = Store(tmp_path / "store").profile(HERE)
    found = MeasuredPricer(profile, ROOFLINE).ops([gelu(10**8), gelu(3 * 10**5)])
    assert found.sources == ["extrapolated", "fitted"]
    assert found.forward_s[0] == pytest.approx(2 * ROOFLINE.ops([gelu(10**8)]).forward_s[0], rel=0.01)


def test_failed_timings_price_nothing() -> None:
    """A key that could not be run falls back."""
    found = MeasuredPricer(Profile(HERE, {product(64): Timing(failed="no")}), ROOFLINE).ops([product(64)])
    assert found.sources == ["roofline"]


def test_too_many_heavy_ops_are_spread() -> None:
    """More shapes than the limit: at most that many of them are timed, from the smallest to the largest."""
    keys = [product(n) for n in range(1, 1001)]
    chosen = ops_to_time(keys, ROOFLINE.ops(keys).forward_s.tolist(), [])
    assert POINTS < len(chosen) <= HEAVY_LIMIT
    assert {product(1), product(1000)} <= set(chosen)


def test_very_long_ops_are_not_timed() -> None:
    """An op predicted to take minutes is left to the curve."""
    assert ops_to_time([product(64), product(100)], [1e-3, 100.0], []) == [product(64)]


def test_collectives_are_timed_on_a_ladder(tmp_path: Path) -> None:
    """Any size lies between two rungs a factor of eight apart; the seconds between are near the true ones."""
    keys = [CollectiveKey("all_reduce", n, 2, 1) for n in (5000, 10**6)] + [CollectiveKey("all_reduce", 100, 1, 1)]
    assert {k.bytes for k in collectives_to_time(keys, [])} == {8**4, 8**5, 8**6, 8**7}
    found = pricer(tmp_path, Doubling()).collectives(keys)
    assert found.sources == ["fitted", "fitted", "roofline"]
    assert found.seconds == pytest.approx([1.05e-4, 1.1e-3, 0], rel=0.1)


def test_timings_of_another_backend_are_refused() -> None:
    """A profile of a processor doesn't price a cluster of accelerators: the error names both."""
    other = Profile(replace(HERE, backend="cpu"), {})
    with pytest.raises(ProfileError, match=r"backend 'cpu' .*'small' is of 'cuda'"):
        MeasuredPricer(other, ROOFLINE)


def test_timings_of_another_device_are_said_to_be() -> None:
    """Prices from a profile of another device of the backend count as extrapolated, and a note names both devices."""
    timing = Timing(Sample((1e-3,)), Sample((1e-3,)))
    timings: dict[Key, Timing] = {product(64): timing, CollectiveKey("all_reduce", 4096, 2, 1): timing}
    own = MeasuredPricer(Profile(HERE, timings), ROOFLINE)
    other = MeasuredPricer(Profile(replace(HERE, device="square"), timings), ROOFLINE)
    assert (own.assumptions, own.ops([product(64)]).sources) == ((), ["measured"])
    assert other.ops([product(64), gelu(10)]).sources == ["extrapolated", "roofline"]
    assert other.collectives([CollectiveKey("all_reduce", 4096, 2, 1)]).sources == ["extrapolated"]
    (note,) = other.assumptions
    assert "'square'" in note
    assert "'round'" in note


def test_what_was_not_timed_keeps_its_source() -> None:
    """A profile of another device says nothing of the prices that the cluster's own constants give."""
    a100 = RooflinePricer(load_cluster("2xa100-80gb"))
    key = OpKey("aten.mm.default", (Operand((4096, 4096), "bfloat16", True),) * 2)
    assert a100.ops([key]).sources == ["fitted"]
    assert MeasuredPricer(Profile(HERE, {}), a100).ops([key]).sources == ["fitted"]


def test_broadcast_sums_have_a_curve_of_their_own() -> None:
    """What adding up gradients of a broadcast operand takes says nothing of sums whose gradients pass through."""

    def added(rows: int, other: int) -> OpKey:
        return OpKey("aten.add.Tensor", (Operand((rows, 8), "float32", True), Operand((other, 8), "float32", True)))

    slow = {added(n, 1): Timing(Sample((1.0,)), Sample((1.0,))) for n in (1000, 10**6)}
    quick = {added(n, n): Timing(Sample((1e-6,)), Sample((1e-6,))) for n in (1000, 10**6)}
    timings: dict[Key, Timing] = dict((slow | quick).items())
    found = MeasuredPricer(Profile(HERE, timings), ROOFLINE).ops([added(10**5, 10**5), added(10**5, 1)])
    assert found.backward_s.tolist() == pytest.approx([1e-6, 1.0], rel=1e-3)


def test_communication_hides_as_far_as_was_timed() -> None:
    """An all-reduce adds 1 of its 4 ms to compute, and compute 3 of its 4 ms to an all-reduce: half is hidden."""
    timings: dict[Key, Timing] = {
        key: Timing(Sample((added_s,)), Sample((4e-3,)))
        for key, added_s in zip(overlap_keys(4), (1e-3, 3e-3), strict=True)
    }
    timed = MeasuredPricer(Profile(HERE, timings), ROOFLINE)
    assert timed.cluster.device.overlap == pytest.approx(0.5)
    assert replace(timed.cluster, device=ROOFLINE.cluster.device) == ROOFLINE.cluster
    assert MeasuredPricer(Profile(HERE, {}), ROOFLINE).cluster == ROOFLINE.cluster
    failed = dict.fromkeys(timings, Timing(failed="out of memory"))
    assert MeasuredPricer(Profile(HERE, failed), ROOFLINE).cluster == ROOFLINE.cluster
