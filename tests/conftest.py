"""Fixtures of all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks and tests share few cores
os.environ["AUTOPAR_CACHE_DIR"] = tempfile.mkdtemp(prefix="autopar-tests-")  # not the user's own
atexit.register(shutil.rmtree, os.environ["AUTOPAR_CACHE_DIR"], ignore_errors=True)

import pytest
from hypothesis import HealthCheck, settings

from tests.pool import Pool

# Times vary on a busy machine: they say nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The rank processes of this test run."""
    pool = Pool()
    yield pool
    pool.close()
