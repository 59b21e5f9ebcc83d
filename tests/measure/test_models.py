"""Device models: constants found again, transfer between devices, files of fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.architecture import ARCHITECTURES, distance
from autopar.cluster import find_device
from autopar.measure.models.device import DeviceModel, Other, device_model
from autopar.measure.models.fits import FORMS, Fit, Fits, read_fits, shipped_fits, write_fits
from autopar.measure.models.form import Array, Form, Hardware
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


def test_residual_tells_variants_apart() -> None:
    """Two kernels, one 20 % slow and one 10 % fast, are each put right at sizes that were not timed."""
    rng = np.random.default_rng(0)
    places, labels = rng.uniform(0, 10, (120, 3)), np.array(["slow", "fast"] * 60)
    beyond = np.where(labels == "slow", 0.2, -0.1) + rng.normal(0, 0.02, 120)
    residual = Residual.through(places, labels, beyond)
    there = rng.uniform(0, 10, (50, 3))
    assert residual.at(there, np.array(["slow"] * 50)) == pytest.approx(np.full(50, 0.2), abs=0.04)
    assert residual.at(there, np.array(["fast"] * 50)) == pytest.approx(np.full(50, -0.1), abs=0.04)


def test_residual_of_noise_is_small() -> None:
    """From noise alone nothing is learnt: what is predicted elsewhere is a fraction of the noise."""
    rng = np.random.default_rng(0)
    residual = Residual.through(rng.uniform(0, 10, (150, 3)), np.array(["x"] * 150), rng.normal(0, 0.05, 150))
    assert np.abs(residual.at(rng.uniform(0, 10, (80, 3)), np.array(["x"] * 80))).mean() < 0.02


def test_nearest_variant_wins() -> None:
    """Of a call's variants the first that is fitted stands for it, in its dtype or the one like it."""
    fits = Fits.of("d", [_fit("", 0.5), _fit("kernel", 0.8)])
    model = DeviceModel(find_device("a100").device(), fits)
    assert model.known("gemm", "bfloat16", ("kernel", "")).values[0] == 0.8
    assert model.known("gemm", "float16", ("other", "")).values[0] == 0.5
    assert model.known("gemm", "float32", ("kernel", "")).source == "roofline"


def test_a_device_left_out_is_priced_by_its_likes() -> None:
    """Without fits of its own a device takes the mean of others', the nearest generation first."""
    device = replace(find_device("a100").device(), efficiency={"bfloat16": 0.7})
    near, far = Fits.of("near", [_fit("", 0.8)]), Fits.of("far", [_fit("", 0.4)])
    others = (Other("ampere", near, {"bfloat16": 0.7}), Other("pascal", far, {"bfloat16": 0.7}))
    known = DeviceModel(device, Fits.of("", ()), others).known("gemm", "bfloat16")
    assert known.source == "roofline"
    weight = np.exp(-2 * 2)  # two generations away
    assert np.log(known.values[0]) == pytest.approx((np.log(0.8) + weight * np.log(0.4)) / (1 + weight))


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
    """Each file of fits is of a device there is, with as many constants as the forms have, from a few timings up."""
    for name, fits in shipped_fits().items():
        assert find_device(name).name == name == fits.device
        for fit in fits.table.values():
            assert len(fit.constants) == len(FORMS[fit.family].constants)
            assert fit.points >= 2 * len(fit.constants)


def test_distance_is_symmetric_and_least_to_itself() -> None:
    """No architecture is nearer to another than to itself."""
    for family in ("gemm", "attention"):
        for first in ARCHITECTURES:
            assert distance(first, first, family) == 0
            for second in ARCHITECTURES:
                assert distance(first, second, family) == distance(second, first, family) >= 0


def _fit(variant: str, share: float) -> Fit:
    return Fit("gemm", "bfloat16", variant, 100, 0.05, tuple(GEMM.start(share=share)))
