"""Pictures of predictions beside measurements, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from autopar.errors import ConfigError
from autopar.files import write_atomically
from autopar.validation.predict import Predicted
from autopar.validation.text import table_text

MOST_POINTS = 5000
"""Points a picture shows at most: every so manieth row."""


def write_page(rows: Sequence[Predicted], path: Path) -> None:
    """Write measured against predicted microseconds and the errors' distribution, a picture a family.

    Raises ConfigError where plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError:
        raise ConfigError("--report needs plotly: pip install 'autopar[report]'") from None
    parts = [f"<pre>{escape(table_text(rows))}</pre>"]
    for family in sorted({row.family for row in rows if row.ape is not None}):
        chosen = [row for row in rows if row.family == family and row.ape is not None]
        chosen = chosen[:: 1 + len(chosen) // MOST_POINTS]
        scatter = go.Figure(layout={"title": f"{family}: predicted and measured microseconds", "template": "none"})
        for gpu in sorted({row.gpu for row in chosen}):
            mine = [row for row in chosen if row.gpu == gpu]
            scatter.add_scattergl(
                x=[row.measured_us for row in mine], y=[row.predicted_us for row in mine],
                mode="markers", name=gpu, marker={"size": 4}, text=[row.op for row in mine],
            )  # fmt: skip
        scatter.update_xaxes(type="log", title="measured")
        scatter.update_yaxes(type="log", title="predicted")
        errors = go.Figure(layout={"title": f"{family}: errors", "barmode": "overlay", "template": "none"})
        errors.add_histogram(x=[row.ape for row in chosen], name="model", opacity=0.6)
        errors.add_histogram(x=[row.baseline_ape for row in chosen], name="constant share", opacity=0.6)
        errors.update_xaxes(range=[0, 1], title="absolute error, share of measured")
        parts += [figure.to_html(full_html=False, include_plotlyjs=False) for figure in (scatter, errors)]
    script = go.Figure().to_html(full_html=False, include_plotlyjs=True)
    write_atomically(
        path,
        "<!doctype html><meta charset='utf-8'><title>autopar validate-ops</title>"
        f"<div style='display:none'>{script}</div>{''.join(parts)}",
    )
