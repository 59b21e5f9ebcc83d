"""TOML files as checked records: whatever is wrong in a file is said at once, with file, field, value and remedy."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from autopar.errors import ConfigError


class Settings(BaseModel):
    """Base of what is read from files: unknown fields are mistakes, values are not coerced between kinds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Refused(ValueError):
    """Raised by a validator: all mistakes in a value, each of them naming what is wrong."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


Record = TypeVar("Record", bound=Settings)


def read_settings(path: Path, record: type[Record]) -> Record:
    """Read and check one TOML file; raises ConfigError with every mistake in it."""
    return check_settings(read_toml(path), record, str(path), path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file; raises ConfigError where it can't be read or is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}). Give the path of a TOML file.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}. Mend the file at that place.") from None


def check_settings(data: dict[str, Any], record: type[Record], origin: str, folder: Path = Path()) -> Record:
    """Check data that came from `origin`; raises ConfigError with every mistake in it.

    Validators find `folder`, in which files named by the data lie, in their context.
    """
    try:
        return record.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(*(f"{origin}: {m}" for e in error.errors() for m in _mistakes(e, record))) from None


def near(name: str, known: list[str]) -> str:
    """'; did you mean ...?' with the known names most like `name`, or a full stop."""
    found = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else "."


def user_folder() -> Path:
    """Where a user's own device files lie; `AUTOPAR_CACHE_DIR` overrides the platform's place for settings."""
    from platformdirs import user_config_path

    override = os.environ.get("AUTOPAR_CACHE_DIR")
    return Path(override) if override else user_config_path("autopar")


def _mistakes(error: ErrorDetails, record: type[Settings]) -> list[str]:
    where = ".".join(str(part) for part in error["loc"]) or "the file"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Refused):
        return [f"{where}: {mistake}" for mistake in cause.mistakes]
    return [_mistake(error, where, record)]


def _mistake(error: ErrorDetails, where: str, record: type[Settings]) -> str:
    if error["type"] == "extra_forbidden":
        known = list(_model_at(record, error["loc"][:-1]).model_fields)
        return f"{where}: unknown field{near(str(error['loc'][-1]), known)} Allowed: {', '.join(known)}."
    if error["type"] == "missing":
        return f"{where}: is missing. Add it."
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{where}: {_short(error['input'])} is not allowed; {message}."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(record: type[Settings], path: tuple[int | str, ...]) -> type[Settings]:
    """The record that describes the table at `path`."""
    for part in path:
        field = record.model_fields.get(str(part))
        record = next(_models_in(field.annotation), record) if field else record
    return record


def _models_in(annotation: object) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
