"""How near predictions of operators are to published timings, on shapes held out of every fit; `docs/accuracy-ops.md`.

python -m benchmarks.op_accuracy FOLDER_OF_ops_TABLES [MARKDOWN_FILE]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from autopar.measure.models.fits import Fits
from autopar.validation.calls import Call
from autopar.validation.predict import predict_calls, summary
from benchmarks.fit_ops import HELD_OUT, fit_device, published, shape_number

PROFILED, FEW = 200, 30
"""Rows of a family at which a device is "profiled"."""

MOST = 2500
"""Held-out rows of a device and family that are scored at most."""

FAMILIES = ("gemm", "attention", "collectives", "elementwise")

UNKNOWN = ("collectives",)
"""Families of which nothing is said of a device left out: its links are known by datasheet only."""


def main(folder: Path, target: Path | None = None) -> None:
    """Score every family and print, or write, the tables."""
    by_device = published(folder)
    kept = {name: [c for c in calls if shape_number(c) >= HELD_OUT] for name, calls in by_device.items()}
    fits = {name: fit_device(name, calls) for name, calls in kept.items()}
    lines = [*HEADER.splitlines()]
    for family in FAMILIES:
        lines += [
            "",
            f"## {family}",
            "",
            apart_text(family, by_device),
            "",
            "| device | rows | profiled | 30 rows | shipped | and profiled | left out | constant |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        rows = list(_family(family, by_device, kept, fits))
        lines += [_line(name, count, errors) for name, count, errors in rows]
        mean = [float(np.mean(column)) for column in zip(*(errors for _, _, errors in rows), strict=True)]
        lines.append(_line("mean over devices", sum(count for _, count, _ in rows), mean))
    text = "\n".join(lines) + "\n"
    if target:
        target.write_text(text, encoding="utf-8")
    print(text)


def _family(
    family: str, by_device: dict[str, list[Call]], kept: dict[str, list[Call]], fits: dict[str, Fits]
) -> Iterator[tuple[str, int, list[float]]]:
    """Device, rows scored and mean errors, in the order of the table's columns."""
    for name, calls in sorted(by_device.items()):
        scored = [c for c in calls if c.family == family and c.usual and shape_number(c) < HELD_OUT]
        if len(scored) < FEW:
            continue
        scored = _some(scored, MOST)
        timed = _some([c for c in kept[name] if c.family == family and c.usual], PROFILED)
        settings: list[tuple[list[Call], list[str]]] = [
            (timed, [name]), (timed[:FEW], [name]), ([], []), (timed, []), ([], [name]),
        ]  # fmt: skip
        found = [summary(predict_calls(scored, rows, without, fits)) for rows, without in settings]
        errors = [one["mean_ape"] for one in found] + [found[0]["baseline_mean_ape"]]
        if family in UNKNOWN:
            errors[4] = np.nan
        yield name, len(scored), errors


def apart_text(family: str, by_device: dict[str, list[Call]]) -> str:
    """How far timings of equal shapes by unlike software lie apart: below it no model comes that isn't told which."""
    shares = []
    for calls in by_device.values():
        groups: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for call in calls:
            if call.family == family and call.usual:
                groups[call.key][call.source].append(np.log(call.measured_s or np.nan))
        times = [[float(np.mean(logs)) for logs in group.values()] for group in groups.values() if len(group) > 1]
        if len(times) >= FEW:
            shares.append(float(np.mean([abs(np.expm1(t - np.mean(group))) for group in times for t in group])))
    return (
        f"Equal shapes that several kinds of software timed on one device lie {np.mean(shares):.1%} from their mean "
        f"(mean over {len(shares)} devices)."
    )


def _some(calls: Sequence[Call], count: int) -> list[Call]:
    return [calls[i] for i in np.random.default_rng(1).permutation(len(calls))[:count]]


def _line(name: str, count: int, errors: Sequence[float]) -> str:
    shares = (f"{error:.1%}" if error == error else "unknown" for error in errors)
    return f"| {name} | {count} | {' | '.join(shares)} |"


HEADER = f"""# Accuracy of operator predictions

Mean absolute error of predicted seconds on published timings, for shapes as training has them: products with
m >= 1024 and n, k >= 512, attention over at least 2048 tokens, collectives of at least 1 MiB inside a node. A quarter
of all shapes is held out of every fit and scored here. Written by

    python -m benchmarks.op_accuracy FOLDER docs/accuracy-ops.md

- *profiled*: none of the device's own constants, but {PROFILED} rows of it, over all its dtypes and libraries
  (`--exclude-device D --fit ROWS.csv`); *{FEW} rows*: so many only.
- *shipped*: constants as in `profiles/fits/`, here fitted without the shapes held out; *and profiled*: with the
  {PROFILED} rows (`--fit ROWS.csv`).
- *left out*: by datasheet and the constants of other devices (`--exclude-device D`).
- *constant*: 80 % of peak FLOP/s for products, 50 % for attention, 80 % of the bandwidth of memory or link.

Where it is wrong, and why: libraries for inference send some heads and head sizes to kernels several times slower
(sglang on Blackwell, head dim 256, by the number of key heads). On V100 all-gathers and all-to-alls of neighbouring
sizes differ. Rows of P4 and P100 scatter as if clocks changed from one to the next, and small cards (L40S, P4, T4) look
bound by power, which is carried over only between boards that run the same kernels. What equal shapes differ by between
kinds of software stands above each table.

The forms' few settings that no fit finds (how far one device's constants hold for another, how soon rows outweigh them)
were chosen with these same shapes in view, so that *left out* and *30 rows* flatter a little.

`autopar validate-ops ROWS.csv` says the same of any rows."""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
