"""The report of what was measured on a device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from autopar.files import write_atomically
from autopar.ranks import local_device


class Section(NamedTuple):
    """A table with what it shows."""

    title: str
    table: str


def write_report(folder: Path, sections: Sequence[Section], day: date) -> Path:
    """Write the sections under the device's name to `device-DATE.md`; the path."""
    device = local_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the host"
    head = f"# On {name}, {day.isoformat()}\n\n`AUTOPAR_REPORTS=FOLDER pytest tests/gpu`, torch {torch.__version__}.\n"
    body = "".join(f"\n## {title}\n\n```\n{table}\n```\n" for title, table in sections)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"device-{day.isoformat()}.md"
    write_atomically(path, head + body)
    return path
