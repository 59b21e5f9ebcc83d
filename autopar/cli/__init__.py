"""The command line. Commands return an `Answer`; `main` prints it, or the error, in the form that was asked for."""

from autopar.cli.main import main

__all__ = ["main"]
