"""Fixtures of all tests, and the environment they run in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import THOROUGH
from tests.pool import Pool

# Times vary on a busy machine: they say nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("busy"), max_examples=THOROUGH)
settings.load_profile("busy")


def pytest_configure() -> None:
    """Before any test module (and torch) is imported: one thread a process, and caches that aren't the user's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["AUTOPAR_CACHE_DIR"] = tempfile.mkdtemp(prefix="autopar-tests-")


def pytest_unconfigure() -> None:
    """Drop the caches of this run."""
    shutil.rmtree(os.environ["AUTOPAR_CACHE_DIR"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs rank processes, so that all else can run beside it."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The rank processes of this test run."""
    pool = Pool()
    yield pool
    pool.close()
