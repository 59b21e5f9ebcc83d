"""Pages of the documentation name what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_limits_name_tests_that_exist() -> None:
    """Every test that docs/limits.md names is in the file that it names."""
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "limits.md").read_text())
    assert len(named) > 30
    missing = [(file, test) for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing
