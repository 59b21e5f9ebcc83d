"""What timings were taken under: clocks, power limits, versions. Said beside them; unlike ones may be mixed."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import torch

from autopar.accelerator import is_host

ASKED = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "power.max_limit",
    "temperature.gpu",
)
"""What nvidia-smi is asked for."""

WAIT_S = 10.0

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
PROCESSORS = Path("/proc/cpuinfo")


def conditions(device: torch.device) -> dict[str, str]:
    """By name, as tools print them with their units; what can't be found out is left out."""
    found = {"torch": torch.__version__, "system": platform.platform()}
    if is_host(device):
        found |= {"governor": _text(GOVERNOR).strip(), "clocks.mhz": _clocks(_text(PROCESSORS))}
    else:
        libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() or ""}
        found |= {name: str(version) for name, version in libraries.items() if version} | _asked(device.index or 0)
    return {name: value for name, value in found.items() if value}


def _clocks(processors: str) -> str:
    """Lowest and highest clock of the processors now."""
    lines = (line.partition(":")[2] for line in processors.splitlines() if line.startswith("cpu MHz"))
    clocks = sorted(float(text) for text in lines)
    return f"{clocks[0]:.0f} - {clocks[-1]:.0f}" if clocks else ""


def _asked(index: int) -> dict[str, str]:
    """What nvidia-smi says of a device; nothing where there is no such tool, or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--id={index}", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(ASKED, (value.strip() for value in said.strip().split(",")), strict=False))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
