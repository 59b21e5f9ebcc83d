"""One HTML page with pictures that needs nothing beside itself: plotly's script is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from autopar.errors import ConfigError
from autopar.files import write_atomically

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2em 0 .2em; border-bottom: 1px solid #ddd; }
p.note { color: #555; margin: .3em 0; } td, th { padding: .15em 1.2em .15em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 13px; }
"""
LAYOUT = {
    "template": "none", "margin": {"l": 110, "r": 20, "t": 10, "b": 45}, "showlegend": True,
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    "font": {"family": "system-ui, sans-serif", "size": 12}, "hovermode": "closest",
}  # fmt: skip
"""What all pictures have in common."""


@dataclass(frozen=True)
class Picture:
    """Traces and layout as plotly.js takes them."""

    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict, hash=False)
    height: int = 300


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of each is a heading."""

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading, a note on what is to be seen, and what there is: pictures, tables, or text as it stands."""

    title: str
    note: str
    parts: Sequence[Picture | Table | str]


def write_page(title: str, sections: Sequence[Section], path: Path) -> None:
    """Write the page, whole or not at all. Raises ConfigError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ConfigError("reports need plotly: pip install 'autopar[report]'") from None
    body = "".join(_section(section, number) for number, section in enumerate(sections))
    write_atomically(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n",
    )


def _section(section: Section, number: int) -> str:
    parts = "".join(_part(part, f"picture-{number}-{i}") for i, part in enumerate(section.parts))
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return f"<section><h2>{escape(section.title)}</h2>{note}{parts}</section>"


def _part(part: Picture | Table | str, name: str) -> str:
    if isinstance(part, str):
        return f"<pre>{escape(part)}</pre>"
    if isinstance(part, Table):
        return f"<table>{''.join(map(_row, part.rows))}</table>"
    layout = json.dumps({**LAYOUT, "height": part.height, **part.layout})
    data = json.dumps(list(part.traces)).replace("</", "<\\/")
    config = '{"displayModeBar": false, "responsive": true}'
    return (
        f'<div id="{name}" style="height:{part.height}px"></div>'
        f'<script>Plotly.newPlot("{name}", {data}, {layout}, {config});</script>'
    )


def _row(cells: Sequence[str]) -> str:
    first, *rest = map(escape, cells)
    return f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
