"""Job files: TOML that names models, clusters and training settings; a list where a scalar stands makes a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from autopar.choices import DTYPES, Objective, Optimizer, listed, parse_bytes
from autopar.cluster import load_cluster, read_cluster
from autopar.errors import ConfigError
from autopar.formulate.config import parse_constraints
from autopar.settings import Refused, Settings
from autopar.trace.models.spec_text import spec_mistakes

Value = TypeVar("Value")
Many: TypeAlias = Annotated[
    tuple[Value, ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list | tuple) else (value,)),
    Field(min_length=1),
]
"""What may stand alone or as a list; (None,) where it isn't given."""
Count: TypeAlias = Annotated[int, Field(ge=1)]
Name: TypeAlias = Annotated[str, Field(min_length=1)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]


class ModelTable(Settings):
    """`[model]`: what to plan, in the words of `autopar plan MODEL`; files lie relative to the job file."""

    spec: Many[Name]

    @field_validator("spec")
    @classmethod
    def _known(cls, specs: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return _without(specs, [m for spec in specs for m in spec_mistakes(spec, folder=_folder(info))])


class ClusterTable(Settings):
    """`[cluster]`: where, by name or by cluster file (relative to the job file)."""

    name: Many[Name | None] = (None,)
    file: Annotated[Many[Name | None], Field(validate_default=True)] = (None,)

    @field_validator("name")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _without(names, [m for name in names for m in _mistakes(load_cluster, name)])

    @field_validator("file")
    @classmethod
    def _readable(cls, files: tuple[str | None, ...], info: ValidationInfo) -> tuple[str | None, ...]:
        given = [file for file in files if file]
        found = [m for file in given for m in _mistakes(read_cluster, _folder(info) / file)]
        if "name" in info.data and bool(given) == (info.data["name"] != (None,)):
            found.append("give either name or file")
        return _without(files, found)


class TrainingTable(Settings):
    """`[training]`: the step to plan."""

    global_batch: Many[Count]
    seq_len: Many[Count | None] = (None,)
    dtype: Many[str] = ("bf16",)
    optimizer: Many[Optimizer] = ("adamw",)
    memory_limit: Many[Any] = (None,)

    @field_validator("dtype")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in DTYPES]
        return _without(names, [f"{name!r} can't be planned; give {listed(DTYPES)}" for name in unknown])

    @field_validator("memory_limit")
    @classmethod
    def _sizes(cls, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        return _without(sizes, [m for size in sizes for m in _mistakes(parse_bytes, size)])


class ConstraintsTable(Settings):
    """`[constraints]`: as the option `--constraint`."""

    list: tuple[str, ...] = Field(default=(), strict=False)

    @field_validator("list")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _without(value, _mistakes(parse_constraints, value))


class ProfileTable(Settings):
    """`[profile]`: a file written by `autopar profile`, relative to the job file."""

    file: Many[Name | None] = (None,)

    @field_validator("file")
    @classmethod
    def _there(cls, files: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        absent = [path for file in files if not (path := _folder(info) / file).is_file()]
        return _without(files, [f"{path}: no such file; give one that `autopar profile -o` wrote" for path in absent])


class SearchTable(Settings):
    """`[search]`: how to search."""

    seed: Many[int] = (0,)
    time_limit_s: Many[Seconds | None] = (None,)
    top: Many[Count] = (1,)
    objective: Many[Objective] = ("step_time",)


class JobFile(Settings):
    """A whole job file."""

    model: ModelTable
    cluster: ClusterTable
    training: TrainingTable
    constraints: ConstraintsTable = ConstraintsTable()
    profile: ProfileTable = ProfileTable()
    search: SearchTable = SearchTable()

    @model_validator(mode="after")
    def _length_fits(self, info: ValidationInfo) -> JobFile:
        pairs = product(self.model.spec, self.training.seq_len)
        return _without(self, [m for spec, length in pairs for m in spec_mistakes(spec, length, _folder(info))])


# --- checks ---------------------------------------------------------------------------------------------------------


def _without(value: Value, mistakes: Sequence[str]) -> Value:
    """The value, if there are no mistakes in it."""
    if mistakes:
        raise Refused(*mistakes)
    return value


def _mistakes(check: Callable[[Any], object], value: object) -> tuple[str, ...]:
    """What the ConfigError of a check says, if it raises one."""
    try:
        check(value)
    except ConfigError as error:
        return error.mistakes
    return ()


def _folder(info: ValidationInfo) -> Path:
    """The folder of the file that is checked."""
    return Path((info.context or {}).get("folder", "."))
