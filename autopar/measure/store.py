"""The store of timings on this machine: one SQLite file that several processes may use at once."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from autopar.errors import ProfileError, reason_of
from autopar.measure.keys import Key, decode_key, encode_key
from autopar.measure.profile import FILE_FORMAT, Environment, Profile, Sample, Timing

LOCK_TIMEOUT_S = 30.0
"""How long to wait for another process that is writing."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS timing (
    environment TEXT NOT NULL, key TEXT NOT NULL,
    forward TEXT NOT NULL, forward_s REAL, forward_iqr_s REAL,
    backward TEXT NOT NULL, backward_s REAL, backward_iqr_s REAL,
    failed TEXT NOT NULL,
    PRIMARY KEY (environment, key)
) WITHOUT ROWID
"""
_INSERT = "INSERT OR REPLACE INTO timing VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_COLUMNS = "key, forward, backward, failed"


def cache_directory() -> Path:
    """The platform's cache directory for autopar, or `AUTOPAR_CACHE_DIR`."""
    import platformdirs

    return Path(os.environ.get("AUTOPAR_CACHE_DIR") or platformdirs.user_cache_dir("autopar"))


class Store:
    """Timings by environment and key. Each call opens the file anew, so nothing is held between calls."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_directory() / f"timings-{FILE_FORMAT}.sqlite"

    def get(self, environment: Environment, keys: Iterable[Key]) -> dict[Key, Timing]:
        """Timings known of `keys`; those never taken are missing."""
        everything = self.profile(environment).timings
        return {key: everything[key] for key in keys if key in everything}

    def profile(self, environment: Environment) -> Profile:
        """All timings taken in `environment`."""
        query = f"SELECT {_COLUMNS} FROM timing WHERE environment = ?"
        with self._open() as connection:
            rows = connection.execute(query, (_text(environment),)).fetchall()
            return Profile(environment, {decode_key(key): _timing(*parts) for key, *parts in rows})

    def add(self, environment: Environment, timings: Mapping[Key, Timing]) -> None:
        """Keep timings, in place of those that were there for the same keys."""
        rows = [(_text(environment), encode_key(key), *_row(timing)) for key, timing in timings.items()]
        with self._open() as connection:
            connection.executemany(_INSERT, rows)

    def environments(self) -> tuple[Environment, ...]:
        """Environments of which there are timings."""
        with self._open() as connection:
            rows = connection.execute("SELECT DISTINCT environment FROM timing ORDER BY environment").fetchall()
        return tuple(Environment(**json.loads(text)) for (text,) in rows)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection inside one transaction; raises ProfileError for a file that is no (whole) store."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                with connection:
                    connection.execute(_SCHEMA)
                    yield connection
            finally:
                connection.close()
        except (sqlite3.DatabaseError, OSError, ValueError) as error:
            raise ProfileError(
                f"{self.path}: the store of timings can't be used ({reason_of(error)}). Remove the file, or set "
                "AUTOPAR_CACHE_DIR to a folder that can be written; timings are then taken anew."
            ) from None


def _text(environment: Environment) -> str:
    return json.dumps(asdict(environment), sort_keys=True)


def _row(timing: Timing) -> tuple[object, ...]:
    parts: list[object] = []
    for sample in (timing.forward, timing.backward):
        known = bool(sample.raw_s)
        parts += [json.dumps(sample.raw_s), sample.median_s if known else None, sample.iqr_s if known else None]
    return (*parts, timing.failed)


def _timing(forward: str, backward: str, failed: str) -> Timing:
    return Timing(Sample(tuple(json.loads(forward))), Sample(tuple(json.loads(backward))), failed)
