"""The command line as a whole: which commands there are, and how answers and errors are printed."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from autopar import __version__
from autopar.cli.answer import Answer, speaks
from autopar.cli.listing import clusters, devices, devices_add, models
from autopar.cli.measuring import profile, profile_collectives, validate, validate_ops
from autopar.cli.planning import estimate, plan, scale, search
from autopar.cli.plans import check, diff, explain, export
from autopar.errors import AutoparError

WIDTH = 80
CLICK_ERROR = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the argument parser raises; found this way since typer carries its own click from some version on."""

COMMANDS: tuple[Callable[..., Answer], ...] = (
    *(plan, estimate, scale, search),
    *(explain, diff, check, export),
    *(profile, profile_collectives, validate, validate_ops),
    *(clusters, models),
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
for command in COMMANDS:
    app.command()(command)
devices_app = typer.Typer(rich_markup_mode=None)
devices_app.callback(invoke_without_command=True)(devices)
devices_app.command("add")(devices_add)
app.add_typer(devices_app, name="devices")


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Find how to split a PyTorch model over many devices, and predict how that runs."""
    del debug, version  # main takes them wherever they stand


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with the contract's code; `--debug` may stand anywhere, `--version` alone."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run([a for a in given if a != "--debug"], "--debug" in given))


def _run(arguments: list[str], debug: bool) -> int:
    if arguments == ["--version"]:
        print(f"autopar {__version__}")
        return 0
    try:
        return _print(app(arguments, prog_name="autopar", standalone_mode=False))
    except KeyboardInterrupt:
        return _fail("KeyboardInterrupt", "interrupted", 130, "--json" in arguments)
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        return _fail(type(error).__name__, _message(error), code, "--json" in arguments)


def _print(answer: object) -> int:
    """Print a command's answer; the exit code. The parser answers with a code itself, after `--help`."""
    if not isinstance(answer, Answer):
        return answer if isinstance(answer, int) else 0
    if speaks():
        _print_out(json.dumps(answer.data) if answer.as_json else answer.text)
    return answer.exit_code


def _print_out(text: str) -> None:
    """Print to a reader that may have gone, as `head` does when it has enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception) -> str:
    if isinstance(error, CLICK_ERROR):
        return error.format_message()  # type: ignore[attr-defined, no-any-return]
    if isinstance(error, AutoparError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"


def _fail(kind: str, message: str, code: int, as_json: bool) -> int:
    if as_json and speaks():
        _print_out(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
    elif not as_json:
        for line in message.splitlines():
            wrapped = textwrap.fill(
                f"error: {line}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            print(wrapped, file=sys.stderr)
    return code
