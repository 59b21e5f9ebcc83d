"""Lines of text within 80 columns: labelled items, tables of shares."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from autopar.report.units import share_text

Number = TypeVar("Number", int, float)
WIDTH = 80
LABEL = 13


def table(values: Mapping[str, Number], text: Callable[[Number], str], whole: float) -> Iterator[str]:
    """A line for each value that isn't 0, with its share of `whole`."""
    for name, value in values.items():
        if value:
            share = share_text(value / whole) if whole else ""
            yield f"  {name.replace('_', ' '):<{LABEL}}{text(value):>12}{share:>8}"


def item(label: str, text: str) -> list[str]:
    """A label and its text, which goes on below itself."""
    return wrap(text, f"  {label:<{LABEL}}", " " * (LABEL + 2))


def wrap(text: str, first: str, rest: str) -> list[str]:
    """Text in lines, the first starting with `first`, the others with `rest`."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [first]
