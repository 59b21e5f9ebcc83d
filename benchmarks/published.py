"""Every published training run and memory figure beside its prediction, in sample and with its source left out.

    python -m benchmarks.published ROWS.csv… [--fit-also ROWS.csv…] [--out FOLDER] [--accuracy docs/accuracy.md]

Prints the table by source; writes a dated report and its plots to FOLDER, and the page on accuracy. Leaving a source
out fits the constants, and those of the closed form, to all others; it takes about four minutes of CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autopar.rows import STEP_KINDS, read_tables
from autopar.transformer.constants import shipped_constants
from autopar.validation.step_page import write_step_page
from autopar.validation.step_text import steps_text
from autopar.validation.steps import PredictedStep, ReadRow, predict_row, predict_steps, read_rows
from autopar.validation.summaries import errors, summary
from benchmarks.accuracy_page import page
from benchmarks.fit_steps import fit, fit_closed, steady, timed_rows


@dataclass(frozen=True)
class Published:
    """All rows predicted with the shipped constants, and each source's with constants fitted to the others."""

    shipped: list[PredictedStep]
    left_out: list[PredictedStep]


def published(paths: Sequence[Path], fit_also: Sequence[Path] = (), *, left_out: bool = True) -> Published:
    """Predict the rows of the files; what is left out is fitted to the others', and to those in `fit_also`."""
    shipped = predict_steps(read_tables(paths, STEP_KINDS))
    training = [path for path in paths if read_tables([path], STEP_KINDS)[0].kind == "training"]
    return Published(shipped, _left_out(training, fit_also) if left_out else [])


def _left_out(paths: Sequence[Path], fit_also: Sequence[Path]) -> list[PredictedStep]:
    rows = timed_rows([*paths, *fit_also])
    known = steady(rows)
    start = fit(known, shipped_constants())
    found = []
    reads = [read for read in read_rows(read_tables(paths, ("training",))) if isinstance(read, ReadRow)]
    for source in sorted({row.source for row in rows}):
        others = [row for row in known if row.source != source]
        constants, closed = fit(others, start), fit_closed(others)
        found += [predict_row(read, constants, closed) for read in reads if read.row.get("source_id") == source]
    return found


def dense(rows: Sequence[PredictedStep], *devices: str) -> list[PredictedStep]:
    """Rows of dense models on devices whose names begin so, times inverted from FLOP/s included."""
    return [
        r for r in rows
        if r.ape is not None and r.kind == "training" and not r.experts and r.gpu.startswith(devices)
        and r.source_id != "bigscience-v100"
    ]  # fmt: skip


def figures(found: Published) -> dict[str, Any]:
    """The figures that the page and the printed table show."""
    return {
        "summary": summary(found.shipped),
        "dense": {name: errors(dense(found.shipped, *devices)) for name, devices in DENSE.items()},
        "dense_left_out": {name: errors(dense(found.left_out, *devices)) for name, devices in DENSE.items()},
        "left_out": summary(found.left_out),
        "dense_baselines": {
            name: summary(dense(found.shipped, *devices))["baselines"] for name, devices in DENSE.items()
        },
        "dense_left_out_baselines": {
            name: summary(dense(found.left_out, *devices))["baselines"] for name, devices in DENSE.items()
        },
    }


DENSE = {"dense A100 and H100": ("a100", "h100"), "dense A100": ("a100",), "dense H100": ("h100",)}


def main() -> None:
    """Print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--fit-also", nargs="*", default=[], type=Path, help="tables that are fitted only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--accuracy", type=Path)
    parser.add_argument("--in-sample", action="store_true", help="leave no source out")
    asked = parser.parse_args()
    found = published(asked.rows, asked.fit_also, left_out=not asked.in_sample)
    print(steps_text(found.shipped))
    if found.left_out:
        print("\nwith each source left out of the fit\n")
        print(steps_text(found.left_out))
    text = page(figures(found), datetime.now(UTC).date().isoformat())
    print("\n" + text)
    if asked.accuracy:
        asked.accuracy.write_text(text, encoding="utf-8")
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        day = datetime.now(UTC).date().isoformat()
        (asked.out / f"published-{day}.md").write_text(text, encoding="utf-8")
        write_step_page(found.shipped, asked.out / f"published-{day}.html")


if __name__ == "__main__":
    main()
