from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.measure import conditions as module
from autopar.measure.conditions import conditions
from autopar.measure.profile import Environment, Profile

SAID = "570.86.10, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W, 700.00 W, 41"


def tool(folder: Path, script: str) -> None:
    """An nvidia-smi that runs `script`."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_clocks_and_power_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's driver, clocks and power limit are what its tool prints; without it, or if it fails, left out."""
    device = torch.device("meta")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(conditions(device)) == {"torch", "system"}
    tool(tmp_path, f'[ "$1" = --id=0 ] && echo "{SAID}"')
    found = conditions(device)
    assert found["driver_version"] == "570.86.10"
    assert (found["clocks.sm"], found["power.limit"], found["temperature.gpu"]) == ("1980 MHz", "700.00 W", "41")
    tool(tmp_path, "exit 9")
    assert set(conditions(device)) == {"torch", "system"}


def test_clocks_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host the governor and the range of clocks are said, where the system tells them."""
    governor, processors = tmp_path / "governor", tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "GOVERNOR", governor)
    monkeypatch.setattr(module, "PROCESSORS", processors)
    assert set(conditions(torch.device("cpu"))) == {"torch", "system"}
    governor.write_text("performance\n")
    processors.write_text("cpu MHz\t: 3100.5\nflags: a\ncpu MHz\t: 2100.0\n")
    found = conditions(torch.device("cpu"))
    assert (found["governor"], found["clocks.mhz"]) == ("performance", "2100 - 3100")


def test_conditions_are_kept_beside_timings(tmp_path: Path) -> None:
    """A file keeps them; of profiles put together those of the later one hold, and they don't make profiles unlike."""
    environment = Environment("a", "cpu", "2.13.0", 1, 1)
    early, late = (Profile(environment, {}, {"clocks.mhz": clock}) for clock in ("2000", "3000"))
    early.merged(late, "late").save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").conditions == {"clocks.mhz": "3000"}
    assert early == late
