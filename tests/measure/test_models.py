"""Device models: constants found again, transfer between devices, files of fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.architecture import ARCHITECTURES, distance
from autopar.cluster import find_device
from autopar.measure.models.covariance import Covariance, Where, learned
from autopar.measure.models.device import DeviceModel, Other, device_model
from autopar.measure.models.fits import FORMS, Fit, Fits, read_fits, shipped_fits, write_fits
from autopar.measure.models.form import FASTER, Array, Form, Hardware
from autopar.measure.models.gemm import GEMM, gemm_sizes
from autopar.measure.models.residual import Residual
from autopar.measure.models.solve import solve

HARDWARE = Hardware(3e14, 2e12, 108, 2, 4e-6)


def products(count: int, seed: int = 0) -> dict[str, Array]:
    """Products of random sizes from 128 to 16384."""
    m, n, k = 2 ** np.random.default_rng(seed).uniform(7, 14, (3, count))
    return dict(gemm_sizes(np.ceil(m), np.ceil(n), np.ceil(k), np.ones(count), 2))


def test_constants_are_found_again() -> None:
    """From timings with 2 % noise and a tenth of outliers, made by known constants, other sizes are met to 2 %."""
    truth = GEMM.start(share=0.6, ramp=250.0, launch=2.0, step=0.6)
    rng, sizes = np.random.default_rng(1), products(400)
    wild = np.where(rng.random(400) < 0.1, 3.0, 1.0)
    measured = GEMM.seconds(truth, sizes, HARDWARE) * np.exp(rng.normal(0, 0.02, 400)) * wild
    found = solve(GEMM, sizes, HARDWARE, measured, np.ones(400))
    other = products(200, seed=2)
    errors = GEMM.seconds(found, other, HARDWARE) / GEMM.seconds(truth, other, HARDWARE) - 1
    assert np.abs(errors).mean() < 0.02


def test_without_timings_of_weight_constants_stay() -> None:
    """Timings of no weight leave the constants where they were expected."""
    sizes, expected = products(20), GEMM.start(share=0.5)
    found = solve(GEMM, sizes, HARDWARE, np.ones(20), np.zeros(20), expected)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.family)
def test_scales_are_inverse(form: Form) -> None:
    """Constants go to the scale on which they are fitted and back."""
    assert form.values(form.plain(form.start())) == pytest.approx(form.start())


def calls(places: Array, labels: Sequence[Sequence[str]], ways: Array | None = None) -> Where:
    """Calls at these places, with these labels."""
    return Where(places, np.array(labels), np.zeros((len(places), 0)) if ways is None else ways)


def test_residual_tells_variants_apart() -> None:
    """Two kernels, one 20 % slow and one 10 % fast, are each put right at sizes that were not timed."""
    rng = np.random.default_rng(0)
    places, labels = rng.uniform(0, 10, (120, 3)), np.array(["slow", "fast"] * 60)
    beyond = np.where(labels == "slow", 0.2, -0.1) + rng.normal(0, 0.02, 120)
    residual = Residual.through(calls(places, [[label] for label in labels]), beyond)
    there = rng.uniform(0, 10, (50, 3))
    assert residual.at(calls(there, [["slow"]] * 50)) == pytest.approx(np.full(50, 0.2), abs=0.04)
    assert residual.at(calls(there, [["fast"]] * 50)) == pytest.approx(np.full(50, -0.1), abs=0.04)


def test_residual_of_noise_is_small() -> None:
    """From noise alone nothing is learnt: what is predicted elsewhere is a fraction of the noise."""
    rng = np.random.default_rng(0)
    residual = Residual.through(calls(rng.uniform(0, 10, (150, 3)), [["x"]] * 150), rng.normal(0, 0.05, 150))
    assert np.abs(residual.at(calls(rng.uniform(0, 10, (80, 3)), [["x"]] * 80))).mean() < 0.02


def test_residual_goes_by_the_usual_time() -> None:
    """Where every tenth timing took 1.7 times as long, 5 % in the mean, half of that at most is predicted."""
    rng = np.random.default_rng(0)
    places, labels = rng.uniform(0, 10, (150, 3)), [["x"]] * 150
    beyond = 0.1 + rng.normal(0, 0.02, 150) + np.where(np.arange(150) % 10 == 0, np.log(1.7), 0.0)
    there = Residual.through(calls(places, labels), beyond).at(calls(rng.uniform(0, 10, (50, 3)), labels[:50]))
    assert there.mean() == pytest.approx(0.1, abs=0.027)


def test_residual_of_a_variant_helps_those_that_share_its_wider_ones() -> None:
    """A version of a library that was never timed is put right by other versions of it, and not by another library."""
    rng = np.random.default_rng(0)
    labels = np.array([["a1", "a"], ["a2", "a"], ["b1", "b"]] * 30)
    beyond = np.where(labels[:, 1] == "a", 0.3, -0.3) + rng.normal(0, 0.02, 90)
    residual = Residual.through(calls(rng.uniform(0, 10, (90, 2)), labels.tolist()), beyond)
    there = rng.uniform(0, 10, (20, 2))
    new = residual.at(calls(there, [["a3", "a"]] * 20)).mean()
    assert 0.1 < new < 0.35
    assert residual.at(calls(there, [["b2", "b"]] * 20)).mean() < -0.1


def test_residual_follows_the_device_that_is_alike() -> None:
    """Of two devices' ways over sizes, wild ones, 25 timings tell whose it is, and how near elsewhere one comes."""
    rng = np.random.default_rng(0)
    places, ways = rng.uniform(0, 10, (125, 3)), rng.normal(0, 0.3, (125, 2))
    timed = ways[:, 1] + rng.normal(0, 0.02, 125)
    known = Residual.through(calls(places[:25], [["x"]] * 25, ways[:25]), timed[:25])
    missed = np.abs(timed[25:] - known.at(calls(places[25:], [["x"]] * 100, ways[25:]))).mean()
    assert missed < 0.1 * np.abs(timed).mean()
    assert known.error == pytest.approx(missed, rel=0.3)


def test_timings_that_foretell_nothing_change_nothing() -> None:
    """Of five timings that scatter about what was expected nothing is made."""
    places = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])
    residual = Residual.through(calls(places, [["x"]] * 5), np.array([0.2, -0.2, 0.2, -0.2, 0.01]))
    assert not residual.says_something
    assert residual.at(calls(places, [["x"]] * 5)).tolist() == [0.0] * 5


def test_covariance_is_the_likeliest() -> None:
    """Noise, and variance over reach, are found again from timings drawn of them; and that a feature says nothing."""
    rng = np.random.default_rng(0)
    where = calls(rng.uniform(0, 10, (200, 2)), [["a"], ["b"]] * 100)
    apart = np.abs(where.places[:, None, 0] - where.places[None, :, 0])
    truth = 0.3**2 * np.exp(-apart / 4) + np.diag(np.full(200, 0.02**2))
    expected = Covariance.expected(where)
    found = learned(expected, where, np.linalg.cholesky(truth) @ rng.normal(size=200), np.ones(200), expected)
    assert np.exp(found.noise) == pytest.approx(0.02, rel=0.5)
    assert np.exp(2 * found.spread).sum() / np.exp(found.reach[0]) == pytest.approx(0.3**2 / 4, rel=0.5)
    assert found.reach[1] > found.reach[0] + 1


def test_polynomial_finds_what_the_form_misses() -> None:
    """A factor that is a product of two sizes' logarithms is learnt from noisy timings, outliers among them."""
    assert GEMM.beyond is not None
    rng, sizes = np.random.default_rng(1), products(400)

    def truth(of: dict[str, Array]) -> Array:
        result: Array = 0.1 + 0.2 * (np.log2(of["m"]) - 11) / 4 * (np.log2(of["k"]) - 11) / 4
        return result

    wild = np.where(rng.random(400) < 0.05, 1.0, 0.0)
    found = GEMM.beyond.through(sizes, truth(sizes) + rng.normal(0, 0.02, 400) + wild)
    other = products(200, seed=2)
    assert np.abs(GEMM.beyond.at(found, other) - truth(other)).mean() < 0.015


def test_polynomial_stays_where_its_features_end() -> None:
    """Sizes far beyond those of training are taken as the last ones: nothing runs away."""
    assert GEMM.beyond is not None
    coefficients = np.full(len(GEMM.beyond.powers), 0.1)
    large, huge = (gemm_sizes(side, side, side, np.ones(1), 2) for side in (np.array([2.0**17]), np.array([2.0**30])))
    assert GEMM.beyond.at(coefficients, large) == pytest.approx(GEMM.beyond.at(coefficients, huge))


def test_a_call_has_one_price_whatever_is_asked_with_it() -> None:
    """Alone and among 300 others a product takes the same seconds, to the last digit."""
    assert GEMM.beyond is not None
    coefficients, sizes = np.random.default_rng(0).normal(0, 0.1, len(GEMM.beyond.powers)), products(301)
    together = GEMM.beyond.at(coefficients, sizes)
    for i in (0, 7, 300):
        assert GEMM.beyond.at(coefficients, {name: column[i : i + 1] for name, column in sizes.items()}) == together[i]


def test_no_call_is_faster_than_its_form_at_best() -> None:
    """However much faster than their form calls are said to be, the rate that bounds searches holds."""
    assert GEMM.beyond is not None
    assert GEMM.limit is not None
    coefficients, sizes = np.zeros(len(GEMM.beyond.powers)), products(300)
    coefficients[0] = -1.0
    seconds = GEMM.priced(GEMM.start(), coefficients, sizes, HARDWARE)
    rates = GEMM.limit.flops(sizes) / seconds / (FASTER * GEMM.limit.rate(GEMM.start(), HARDWARE))
    assert rates.max() == pytest.approx(1.0)


def test_nearest_variant_wins() -> None:
    """Of a call's variants the first that is fitted stands for it, in its dtype or the one like it."""
    fits = Fits.of("d", [_fit("", 0.5), _fit("kernel", 0.8)])
    model = DeviceModel(find_device("a100").device(), fits)
    assert model.known("gemm", "bfloat16", ("kernel", "")).values[0] == 0.8
    assert model.known("gemm", "float16", ("other", "")).values[0] == 0.5
    assert model.known("gemm", "float32", ("kernel", "")).source == "roofline"


def test_a_device_left_out_is_priced_by_its_likes() -> None:
    """Without fits of its own a device takes the mean of others', the nearest generation first."""
    device = replace(find_device("a100").device(), efficiency={"bfloat16": 0.7}, power_w=None)
    near, far = Fits.of("near", [_fit("", 0.8)]), Fits.of("far", [_fit("", 0.4)])
    others = (Other("ampere", near, {"bfloat16": 0.7}, {}), Other("pascal", far, {"bfloat16": 0.7}, {}))
    known = DeviceModel(device, Fits.of("", ()), others).known("gemm", "bfloat16")
    assert known.source == "roofline"
    weight = np.exp(-2 * 2)  # two generations away
    carried = (np.log(0.8) + weight * np.log(0.4)) / (1 + weight)
    assert np.log(known.values[0]) == pytest.approx(0.7 * carried + 0.3 * np.log(1.1 * 0.7))  # beside the file's figure


def test_power_counts_between_devices_of_the_same_kernels() -> None:
    """Half the watts for a FLOP/s of peak is a share less by the root of two, before the file's own figure is heard."""
    device = replace(find_device("a100").device(), efficiency={"bfloat16": 0.7})
    watts = (device.power_w or 0) / device.peak_flops_per_s["bfloat16"]

    def share(other_watts: float) -> float:
        other = Other("ampere", Fits.of("o", [_fit("", 0.8)]), {"bfloat16": 0.7}, {"bfloat16": other_watts})
        return float(DeviceModel(device, Fits.of("", ()), (other,)).known("gemm", "bfloat16").values[0])

    assert share(2 * watts) / share(watts) == pytest.approx(2 ** (-0.5 * 0.7))
    assert share(watts / 4) == pytest.approx(share(watts))  # no device of its maker is known to reach more


def test_power_counts_for_plain_float32_of_other_generations() -> None:
    """A board of another generation with more watts for a FLOP/s says the less of this one, never the more."""
    device = replace(find_device("t4").device(), efficiency={"float32": 0.7})
    watts = (device.power_w or 0) / device.peak_flops_per_s["float32"]

    def share(other_watts: float, dtype: str) -> float:
        fit = replace(_fit("", 0.8), dtype=dtype)
        other = Other("ampere", Fits.of("o", [fit]), {dtype: 0.7}, {dtype: other_watts})
        return float(DeviceModel(device, Fits.of("", ()), (other,)).known("gemm", dtype).values[0])

    assert share(4 * watts, "float32") / share(watts, "float32") == pytest.approx(4 ** (-0.5 * 0.7))
    assert share(watts / 4, "float32") == pytest.approx(share(watts, "float32"))
    assert share(4 * watts, "float16") == pytest.approx(share(watts, "float16"))  # units for it differ


def test_few_timings_in_general_leave_variants_to_devices_alike() -> None:
    """What is fitted to few timings of all kinds doesn't stand for a library that is known of another device."""
    other = Other("ampere", Fits.of("o", [_fit("", 0.8), _fit("library", 0.6)]), {}, {})
    own, device = Fits.of("d", [_fit("", 0.3)]), find_device("a100").device()
    variants = ("library", "")
    assert DeviceModel(device, own, (other,)).known("gemm", "bfloat16", variants).values[0] == 0.3
    few = DeviceModel(device, own, (other,), few=True)
    assert few.known("gemm", "bfloat16", variants).source == "roofline"
    assert few.known("gemm", "bfloat16", ("unheard of", "")).values[0] == 0.3


def test_left_out_devices_have_no_say() -> None:
    """A device model without some devices has neither their constants as its own nor as others'."""
    device = find_device("h100").device()
    model = device_model(device, without=[device.fits, "h200-141gb"])
    names = {other.fits.device for other in model.others}
    assert not model.own.table
    assert not names & {device.fits, "h200-141gb"}
    assert "a100-80gb" in names


def test_files_of_fits_read_back(tmp_path: Path) -> None:
    """What is written is read, to four digits."""
    fits = Fits.of("d", [_fit("", 0.51234567), _fit("kernel", 0.8)])
    write_fits(fits, tmp_path / "d.toml", "from\nsomewhere")
    read = read_fits(tmp_path / "d.toml")
    assert read.device == "d"
    assert read.table.keys() == fits.table.keys()
    for key, fit in read.table.items():
        assert fit.constants == pytest.approx(fits.table[key].constants, rel=1e-3)


def test_shipped_fits_are_of_shipped_devices() -> None:
    """Each file of fits is of a device there is, with as many numbers as the forms have, from as many timings up.

    Curves of collectives, whose steps stay near those of wider ones, need ten.
    """
    for name, fits in shipped_fits().items():
        assert find_device(name).name == name == fits.device
        for fit in fits.table.values():
            assert len(fit.constants) == len(FORMS[fit.family].constants)
            assert fit.points >= (10 if fit.family == "collectives" else len(fit.constants) + len(fit.beyond))


def test_distance_is_symmetric_and_least_to_itself() -> None:
    """No architecture is nearer to another than to itself."""
    for family in ("gemm", "attention"):
        for first in ARCHITECTURES:
            assert distance(first, first, family) == 0
            for second in ARCHITECTURES:
                assert distance(first, second, family) == distance(second, first, family) >= 0


def _fit(variant: str, share: float) -> Fit:
    return Fit("gemm", "bfloat16", variant, 100, 0.05, tuple(GEMM.start(share=share)))
