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

PROFILED, FEW, MANY = 200, 30, 1000
"""Rows of a family at which a device is "profiled"; and so many as to tell what timings can't tell."""

MOST = 2500
"""Held-out rows of a device and family that are scored at most."""

FAMILIES = ("gemm", "attention", "collectives", "elementwise")

LEFT_OUT = 5
"""The column of a device that is left out."""

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
            f"| device | rows | profiled | {FEW} rows | shipped | and profiled | and {MANY} | left out | constant |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
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
        many = _some([c for c in kept[name] if c.family == family and c.usual], MANY)
        timed = many[:PROFILED]
        settings: list[tuple[list[Call], list[str]]] = [
            (timed, [name]), (timed[:FEW], [name]), ([], []), (timed, []), (many, []), ([], [name]),
        ]  # fmt: skip
        found = [summary(predict_calls(scored, rows, without, fits)) for rows, without in settings]
        errors = [one["mean_ape"] for one in found] + [found[0]["baseline_mean_ape"]]
        if family in UNKNOWN:
            errors[LEFT_OUT] = np.nan
        yield name, len(scored), errors


def apart_text(family: str, by_device: dict[str, list[Call]]) -> str:
    """How far timings of equal shapes lie apart: by unlike software, and by other versions of the same.

    No model comes nearer than the former unless told which software, and none than the latter.
    """
    unlike, again = [], []
    for calls in by_device.values():
        groups: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for call in calls:
            if call.family == family and call.usual:
                groups[call.key][call.variants[0]].append(np.log(call.measured_s or np.nan))
        unlike += _apart([[float(np.mean(logs)) for logs in group.values()] for group in groups.values()])
        again += _apart([logs for group in groups.values() for logs in group.values()])
    kinds = (("several kinds of software", unlike), ("one kind in several versions", again))
    said = [f"timed by {who} {np.mean(shares):.1%} ({len(shares)} devices)" for who, shares in kinds if shares]
    return f"How far equal shapes lie from their mean: {'; '.join(said) or 'none was timed twice'}."


def _apart(times: Sequence[Sequence[float]]) -> list[float]:
    """The mean distance of logarithms from the mean of their group, where enough groups have several."""
    several = [group for group in times if len(group) > 1]
    return [float(np.mean([abs(np.expm1(t - np.mean(g))) for g in several for t in g]))] if len(several) >= FEW else []


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
  {PROFILED} rows (`--fit ROWS.csv`); *and {MANY}*: with so many, which tells what timings of neighbours don't.
- *left out*: by datasheet and the constants of other devices (`--exclude-device D`).
- *constant*: 80 % of peak FLOP/s for products, 50 % for attention, 80 % of the bandwidth of memory or link.

Where it is wrong, and why: libraries for inference send some heads and head sizes to kernels several times slower
(sglang on Blackwell, head dim 256, by the number of key heads). On V100 all-gathers and all-to-alls of neighbouring
sizes differ. Rows of P4 and P100 scatter as if clocks changed from one to the next, and small cards (L40S, P4, T4) look
bound by power, of which datasheets tell watts but not what a FLOP takes. What equal shapes differ by between
kinds of software, and between versions of one, stands above each table. {MANY} timings tell hardly more than
{PROFILED}: what is left is which kernel a library picks for just this shape, and no neighbour tells that. Thirty rows
are a few of each dtype and library of the table; one's own device has one of them.

The forms' few settings that no fit finds (how far one device's constants hold for another, how soon rows outweigh them)
were chosen with these same shapes in view, so that *left out* and *30 rows* flatter a little.

`autopar validate-ops ROWS.csv` says the same of any rows."""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
