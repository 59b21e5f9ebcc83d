"""Figures of the device, written as a dated report where `AUTOPAR_REPORTS` names a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.gpu.report import Section, write_report


@pytest.fixture(scope="session")
def sections() -> Iterator[list[Section]]:
    """What is written when all is run: `benchmarks/reports/device-DATE.md`, say."""
    found: list[Section] = []
    yield found
    folder = os.environ.get("AUTOPAR_REPORTS")
    if folder and found:
        print(write_report(Path(folder), found, datetime.now(UTC).date()))


@pytest.fixture
def figures(sections: list[Section]) -> Callable[[str, str], None]:
    """Print a table under a title, and keep it for the report."""

    def keep(title: str, table: str) -> None:
        print(f"\n{title}\n{table}")
        sections.append(Section(title, table))

    return keep
