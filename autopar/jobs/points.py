"""The points that job files sweep over, and what their results are called. Torch-free."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from autopar.errors import ConfigError
from autopar.jobs.behind import files_behind
from autopar.jobs.files import JobFile
from autopar.settings import read_settings
from autopar.trace.models.spec_text import spec_file


@dataclass(frozen=True)
class Point:
    """One plan to be found, by the arguments of `autopar plan`; files are named by their whole paths.

    `name` is that of its results: words for people, and a digest of all that the answer depends on. `model` is the
    specification as written in the job file.
    """

    name: str
    model: str
    spec: str
    cluster: str
    global_batch: int
    seq_len: int | None
    dtype: str
    optimizer: str
    memory_limit: str | int | None
    profile: str | None
    seed: int
    time_limit_s: float | None
    top: int
    objective: str
    constraints: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A checked job file and the points it sweeps over, in file order (the last field varies quickest)."""

    path: Path
    settings: JobFile
    points: tuple[Point, ...]

    @property
    def folder(self) -> Path:
        """Where results lie: beside the file, under its name."""
        return self.path.with_suffix("")


def read_jobs(paths: Sequence[Path]) -> list[Job]:
    """Read and check job files; raises ConfigError with every mistake in all of them."""
    jobs: list[Job] = []
    mistakes: list[str] = []
    for path in paths:
        try:
            jobs.append(_read_job(path))
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(*mistakes)
    return jobs


def _read_job(path: Path) -> Job:
    if not path.suffix:
        raise ConfigError(f"{path}: results would lie in a folder of that name; give a file whose name ends in .toml")
    settings = read_settings(path, JobFile)
    points = {point.name: point for point in _points(settings, path.parent)}
    return Job(path, settings, tuple(points.values()))


def _points(job: JobFile, folder: Path) -> Iterator[Point]:
    training, search = job.training, job.search
    where = job.cluster.name if job.cluster.file == (None,) else job.cluster.file
    swept = (
        job.model.spec, where, training.global_batch, training.seq_len, training.dtype, training.optimizer,
        training.memory_limit, job.profile.file, search.seed, search.time_limit_s, search.top, search.objective,
    )  # fmt: skip
    for values in product(*swept):
        written = Point("", values[0], *values, constraints=job.constraints.list)  # type: ignore[misc]
        yield replace(
            written,
            name=_name(written, folder),
            spec=_opened(written.spec, spec_file(written.spec), folder),
            cluster=_opened(written.cluster, written.cluster if where is job.cluster.file else None, folder),
            profile=_opened(written.profile, written.profile, folder) if written.profile else None,
        )


def _opened(text: str, file: str | None, folder: Path) -> str:
    """`text` with the path of the file it names, which lies relative to `folder`."""
    return text.replace(file, str((folder / file).resolve()), 1) if file else text


def _name(point: Point, folder: Path) -> str:
    """Model, cluster and batch in words, then a digest of the point as written and of the files it depends on."""
    named = [folder / file for file in (spec_file(point.spec), point.cluster, point.profile) if file]
    files = [read for file in named for read in files_behind(file)]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    digest = hashlib.sha256(json.dumps([asdict(point), contents]).encode()).hexdigest()[:8]
    model = point.model.partition(":")[0] if "=" in point.model else Path(point.model).stem
    words = f"{model[-30:]} {Path(point.cluster).name.removesuffix('.toml')[-30:]} {point.global_batch} {digest}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-.")
