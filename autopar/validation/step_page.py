"""Pictures of predicted steps and bytes beside measured ones, as one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from autopar.errors import ConfigError
from autopar.files import write_atomically
from autopar.validation.step_text import steps_text
from autopar.validation.steps import PredictedStep


def write_step_page(rows: Sequence[PredictedStep], path: Path) -> None:
    """Write measured against predicted by source, and each source's errors. Raises ConfigError without plotly."""
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError:
        raise ConfigError("--report needs plotly: pip install 'autopar[report]'") from None
    timed = [r for r in rows if r.ape is not None and r.kind == "training"]
    weighed = [r for r in rows if r.memory_ape is not None and r.is_total]
    figures = [
        _scatter(go, "seconds of a step", timed, lambda r: r.measured_step_time_s, lambda r: r.predicted_step_time_s),
        _boxes(go, timed),
        _scatter(
            go, "bytes at the peak", weighed, lambda r: r.measured_peak_memory_bytes,
            lambda r: r.predicted_peak_memory_bytes,
        ),
    ]  # fmt: skip
    parts = [figure.to_html(full_html=False, include_plotlyjs=i == 0) for i, figure in enumerate(figures)]
    write_atomically(
        path,
        "<!doctype html><meta charset='utf-8'><title>autopar validate</title>"
        f"<pre>{escape(steps_text(rows))}</pre>{''.join(parts)}",
    )


Column = Callable[[PredictedStep], float | None]


def _scatter(go: Any, title: str, rows: Sequence[PredictedStep], x: Column, y: Column) -> Any:
    figure = go.Figure(layout={"title": f"{title}: predicted and measured", "template": "none"})
    for source in sorted({r.source_id for r in rows}):
        mine = [r for r in rows if r.source_id == source]
        figure.add_scatter(
            x=[x(r) for r in mine], y=[y(r) for r in mine], mode="markers", name=source, marker={"size": 5},
            text=[r.row_id for r in mine],
        )  # fmt: skip
    both = [v for r in rows for v in (x(r), y(r)) if v]
    if both:
        ends = [min(both), max(both)]
        figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "black", "width": 1})
    figure.update_xaxes(type="log", title="measured")
    figure.update_yaxes(type="log", title="predicted")
    return figure


def _boxes(go: Any, rows: Sequence[PredictedStep]) -> Any:
    figure = go.Figure(layout={"title": "predicted over measured seconds, less 1", "template": "none"})
    for source in sorted({r.source_id for r in rows}):
        mine = [(r.predicted_step_time_s, r.measured_step_time_s) for r in rows if r.source_id == source]
        figure.add_box(y=[p / m - 1 for p, m in mine if p and m], name=source)
    return figure
