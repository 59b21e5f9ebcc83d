"""Compiled steps and profiles by layer on a real device, and the same code on a small model without one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import torch

from autopar.accelerator import runtime
from autopar.ranks import local_device
from tests.gpu.report import Section, write_report
from tests.gpu.training import FULL, TINY, as_it_is_and_compiled, layers_seen

ROUNDS = 10
NEEDS_DEVICE = pytest.mark.skipif(not runtime().is_available(), reason="no device that torch can use")
HOST = torch.device("cpu")


@pytest.mark.gpu
@NEEDS_DEVICE
def test_a_compiled_step_on_the_device(figures: Callable[[str, str], None]) -> None:
    """The loss of the compiled step is that of the plain one to bfloat16's rounding; times are printed."""
    plain, compiled = as_it_is_and_compiled(FULL, local_device(), ROUNDS)
    times = f"as it is {1e3 * plain.seconds_s:8.2f} ms\ncompiled {1e3 * compiled.seconds_s:8.2f} ms"
    figures("One step, as it is and compiled", times)
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-2)


@pytest.mark.gpu
@NEEDS_DEVICE
def test_layers_in_a_profile_on_the_device(figures: Callable[[str, str], None]) -> None:
    """A profiler has a range for every layer, under its name, with time on the device inside it."""
    names, seen = layers_seen(FULL, local_device())
    figures("Forward passes by layer", "\n".join(f"{name:24}{seen.get(name, 0.0):9.3f} ms" for name in names))
    assert {*names} <= {*seen}
    assert all(seen[name] > 0 for name in names)


@pytest.mark.slow
@pytest.mark.skipif(runtime().is_available(), reason="plans are for the accelerator there")
def test_a_compiled_step_on_the_host() -> None:
    """Without an accelerator the losses are the same to float64's rounding."""
    plain, compiled = as_it_is_and_compiled(TINY, HOST, 1, backend="aot_eager")
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(runtime().is_available(), reason="plans are for the accelerator there")
def test_layers_in_a_profile_on_the_host() -> None:
    """Without an accelerator, too, a profiler has a range for every layer."""
    names, seen = layers_seen(TINY, HOST)
    assert len(names) >= 4
    assert {*names} <= {*seen}


def test_a_report_is_dated(tmp_path: Path) -> None:
    """The report has the date in its name, and each table under its title."""
    path = write_report(tmp_path, [Section("Times", "a 1 ms"), Section("Bytes", "b 2 MiB")], date(2026, 1, 2))
    text = path.read_text()
    assert path.name == "device-2026-01-02.md"
    assert text.index("## Times") < text.index("a 1 ms") < text.index("## Bytes") < text.index("b 2 MiB")
    assert torch.__version__ in text
