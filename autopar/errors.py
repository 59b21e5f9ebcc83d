"""Every error autopar raises on purpose; the message carries the value, what is allowed and the remedy."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line returns for it."""

    exit_code = 1


class ConfigError(AutoparError):
    """Something the user wrote (argument, file, constraint) is not allowed.

    `mistakes` lists every mistake found, so that a file is mended in one go.
    """

    exit_code = 2

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes: tuple[str, ...] = mistakes


class PlanError(AutoparError):
    """A plan file is unreadable, or does not fit the model, shapes or devices it is used with."""

    exit_code = 2


class ProfileError(AutoparError):
    """A profile is unreadable, or was taken in another environment."""

    exit_code = 2


class InfeasibleError(AutoparError):
    """No plan satisfies the limits; the message names the binding limit and the smallest change that helps."""

    exit_code = 3


class TraceError(AutoparError):
    """The model can't be traced; the message names the module, the line and why."""

    exit_code = 4


class EmitError(AutoparError):
    """A plan can't be turned into a running module, or a running module was used wrongly."""

    exit_code = 1


def reason_of(error: Exception) -> str:
    """Why a file can't be used, in words: of the system's errors without their number and the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def as_document(error: Exception) -> dict[str, dict[str, str | int]]:
    """A failure as the JSON document that commands print; an error that isn't deliberate is said to be unexpected."""
    message = str(error) if isinstance(error, AutoparError) else f"unexpected {type(error).__name__}: {error}"
    return {"error": {"kind": type(error).__name__, "message": message, "exit_code": getattr(error, "exit_code", 1)}}
