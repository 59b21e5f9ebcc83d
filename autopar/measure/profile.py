"""Timings and the environment they were taken in; their file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import ProfileError, reason_of
from autopar.files import write_atomically
from autopar.measure.keys import Key, decode_key, encode_key

FILE_FORMAT = 1
"""Number of the file format of profiles."""


@dataclass(frozen=True)
class Environment:
    """What a timing depends on beside its key.

    `device`: its name; `backend`: cpu or cuda; `torch`: its version; `threads` of a process; `busy_ranks`: processes of
    the job that were busy at the same time, on so many `nodes`.
    """

    device: str
    backend: str
    torch: str
    threads: int
    busy_ranks: int
    nodes: int = 1

    def require_same(self, other: Environment, origin: str) -> None:
        """Raise ProfileError, naming every key that differs, unless timings of both may stand side by side."""
        unlike = [
            f"{f.name} = {getattr(other, f.name)!r} there, {getattr(self, f.name)!r} here"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        if unlike:
            raise ProfileError(
                f"{origin} was taken in another environment: {'; '.join(unlike)}. "
                "Timings of unlike environments are not mixed: profile again, or keep them in files of their own."
            )


@dataclass(frozen=True)
class Sample:
    """Repeated timings of one thing, in seconds."""

    raw_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.raw_s)

    @property
    def mean_s(self) -> float:
        """Mean of the repeats: what a run costs where many are added up, now and then slow ones among them."""
        return statistics.fmean(self.raw_s)

    @property
    def iqr_s(self) -> float:
        """Distance between the quartiles; 0 with fewer than two repeats."""
        if len(self.raw_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.raw_s, n=4, method="inclusive")
        return high - low


@dataclass(frozen=True)
class Timing:
    """Timings of one key. A collective has no backward; `failed` says why there are none at all ('' = there are)."""

    forward: Sample = Sample(())
    backward: Sample = Sample(())
    failed: str = ""

    @property
    def forward_s(self) -> float:
        """Mean seconds of the forward pass."""
        return self.forward.mean_s

    @property
    def backward_s(self) -> float:
        """Mean seconds of the backward pass, 0 where there is none."""
        return self.backward.mean_s if self.backward.raw_s else 0.0


@dataclass(frozen=True)
class Profile:
    """All timings of one environment, and the `conditions` (clocks, power limit, versions) that the last were taken
    under."""

    environment: Environment
    timings: Mapping[Key, Timing] = field(hash=False)
    conditions: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically."""
        rows = [{"key": encode_key(key), **asdict(timing)} for key, timing in self.timings.items()]
        data = {
            "profile_format": FILE_FORMAT, "environment": asdict(self.environment), "conditions": dict(self.conditions),
            "timings": rows,
        }  # fmt: skip
        write_atomically(Path(path), json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; raises ProfileError naming the file when it is absent or not a whole profile."""
        try:
            data = json.loads(Path(path).read_text())
            if data["profile_format"] > FILE_FORMAT:
                raise ValueError(f"profile_format is {data['profile_format']}, this autopar reads up to {FILE_FORMAT}")
            timings = {decode_key(row["key"]): _timing(row) for row in data["timings"]}
            conditions = {str(name): str(value) for name, value in dict(data.get("conditions", {})).items()}
            return cls(Environment(**data["environment"]), timings, conditions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProfileError(
                f"{path}: can't be read as a profile ({reason_of(error)}). Give a file written by `autopar profile -o`."
            ) from None

    def merged(self, other: Profile, origin: str) -> Profile:
        """This profile with the timings of `other`, which win; raises ProfileError for an unlike environment."""
        self.environment.require_same(other.environment, origin)
        return Profile(self.environment, {**self.timings, **other.timings}, other.conditions or self.conditions)


def _timing(row: dict[str, Any]) -> Timing:
    forward, backward = (Sample(tuple(map(float, row[part]["raw_s"]))) for part in ("forward", "backward"))
    return Timing(forward, backward, str(row["failed"]))
