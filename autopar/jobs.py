"""Offline search jobs: TOML files that name models, clusters and training settings, and the points they sweep over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, field_validator, model_validator

from autopar.cluster import load_cluster
from autopar.errors import ConfigError
from autopar.formulate.config import parse_constraints
from autopar.settings import Settings, read_settings

Value = TypeVar("Value")
OneOrMany: TypeAlias = Value | Annotated[list[Value], Field(min_length=1)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Name: TypeAlias = Annotated[str, Field(min_length=1)]
Dtype: TypeAlias = Literal["bf16", "fp16", "fp32", "fp64", "fp8", "mxfp8", "nvfp4"]
Optimizer: TypeAlias = Literal["adamw", "adam", "sgd", "adafactor", "adamw8bit"]
Objective: TypeAlias = Literal["step_time", "tokens_per_s_per_device", "cost_per_token", "energy_per_token", "memory"]


class ModelTable(Settings):
    """`[model]`: what to plan, in the words of `autopar plan MODEL`."""

    spec: OneOrMany[Name]


class ClusterTable(Settings):
    """`[cluster]`: where, by name or by cluster file."""

    name: OneOrMany[Name] | None = None
    file: OneOrMany[Name] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ClusterTable:
        if (self.name is None) == (self.file is None):
            raise ValueError("give either name or file")
        return self

    @field_validator("name")
    @classmethod
    def _known(cls, value: str | list[str] | None) -> str | list[str] | None:
        for name in _many(value):
            _as_value_error(load_cluster, name)
        return value


class TrainingTable(Settings):
    """`[training]`: the step to plan."""

    global_batch: OneOrMany[Count]
    seq_len: OneOrMany[Count] | None = None
    dtype: OneOrMany[Dtype] = "bf16"
    optimizer: OneOrMany[Optimizer] = "adamw"


class ConstraintsTable(Settings):
    """`[constraints]`: as the option `--constraint`."""

    list: tuple[str, ...] = Field(default=(), strict=False)

    @field_validator("list")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _as_value_error(parse_constraints, value)
        return value


class ProfileTable(Settings):
    """`[profile]`: a file written by `autopar profile`."""

    file: Name | None = None


class SearchTable(Settings):
    """`[search]`: how to search."""

    seed: int = 0
    time_limit_s: Annotated[float, Field(gt=0, strict=False)] | None = None
    top: Count = 1
    objective: Objective = "step_time"


class JobFile(Settings):
    """A whole job file."""

    model: ModelTable
    cluster: ClusterTable
    training: TrainingTable
    constraints: ConstraintsTable = ConstraintsTable()
    profile: ProfileTable = ProfileTable()
    search: SearchTable = SearchTable()


@dataclass(frozen=True)
class Point:
    """One plan to be found: a model, a cluster (name or file) and a step."""

    spec: str
    cluster: str
    global_batch: int
    seq_len: int | None
    dtype: str
    optimizer: str


@dataclass(frozen=True)
class Job:
    """A checked job file and the points it sweeps over, in file order (the last field varies quickest)."""

    path: Path
    settings: JobFile
    points: tuple[Point, ...]


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
    settings = read_settings(path, JobFile)
    files = [str(path.parent / file) for file in _many(settings.cluster.file)]
    mistakes = [f"{path}: cluster.file: {mistake}" for file in files for mistake in _mistakes(load_cluster, file)]
    if mistakes:
        raise ConfigError(*mistakes)
    training = settings.training
    swept = product(
        _many(settings.model.spec),
        files or _many(settings.cluster.name),
        _many(training.global_batch),
        _many(training.seq_len) or [None],
        _many(training.dtype),
        _many(training.optimizer),
    )
    return Job(path, settings, tuple(Point(*values) for values in swept))


def _many(value: Any) -> list[Any]:
    """The values of a field that may be a list or stand alone; none for None."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _as_value_error(check: Callable[[Any], object], value: object) -> None:
    """Run a check of ours inside a validator, which reports ValueErrors."""
    mistakes = _mistakes(check, value)
    if mistakes:
        raise ValueError("; ".join(mistakes))


def _mistakes(check: Callable[[Any], object], value: object) -> tuple[str, ...]:
    """What the ConfigError of a check says, if it raises one."""
    try:
        check(value)
    except ConfigError as error:
        return error.mistakes
    return ()
