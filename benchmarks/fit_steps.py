"""Constants of whole steps from published training runs: writes `profiles/steps.toml`.

    python -m benchmarks.fit_steps ROWS.csv…

Robust least squares in the logarithm of seconds (Levenberg-Marquardt, Huber's weights) with what was expected before;
every source weighs as the square root of its rows, so that no large one drowns the others. Rows of a source err
together (its software, its way of timing): each has an offset of its own in the fit, a random effect (N. Laird and J.
Ware, "Random-effects models for longitudinal data", 1982), so that no constant is bent to explain it. None is shipped.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.architecture import ARCHITECTURES
from autopar.cluster import profiles_folder
from autopar.rows import read_tables
from autopar.transformer.constants import (
    PRIORS,
    SPREAD_OF_DEVICES,
    SPREAD_OF_GENERATIONS,
    SPREAD_OF_LINKS,
    Constants,
    Prior,
)
from autopar.transformer.step import step_time
from autopar.validation.measures import measured_s
from autopar.validation.plain import Closed, closed_form_s
from autopar.validation.steps import ReadRow, read_rows

Array = NDArray[np.float64]

UNSTEADY = ("bigscience-v100",)
"""Sources that say of themselves that equal runs differ by 40 %: not fitted."""

NOISE, OUTLIER, STEP = 0.05, 0.12, 1e-3
SPREAD_OF_SOURCES = 0.05
"""How far a source's times are expected from the others', in the logarithm: as far as a device from its generation."""

ROUNDS, TRIES = 12, 6
LEAST_ROWS = 3
"""Rows of a device or link from which it has a factor of its own."""


@dataclass(frozen=True)
class Timed:
    """A row that was measured."""

    read: ReadRow
    seconds: float
    source: str


def timed_rows(paths: Sequence[Path]) -> list[Timed]:
    """Rows with a time, inverted ones included."""
    found = []
    for read in read_rows(read_tables(paths, ("training",))):
        if isinstance(read, ReadRow):
            seconds, _ = measured_s(read.row, read.run)
            if seconds:
                found.append(Timed(read, seconds, read.row.get("source_id", "")))
    return found


@dataclass(frozen=True)
class _Unknown:
    """A constant or a source's offset to be found, and the rows that feel it."""

    known: Prior
    rows: NDArray[np.intp]


def fit(rows: Sequence[Timed], start: Constants | None = None) -> Constants:
    """Constants that explain the rows."""
    unknowns, offsets = _unknowns(rows), _offsets(rows)
    count, everything = len(unknowns), [*unknowns, *offsets]
    logs = np.log([row.seconds for row in rows])

    def constants(plain: Array) -> Constants:
        pairs = zip(unknowns, plain[:count].tolist(), strict=True)
        return Constants({unknown.known.name: unknown.known.value(value) for unknown, value in pairs})

    def predicted(plain: Array, which: NDArray[np.intp]) -> Array:
        known, moved = constants(plain), np.zeros(len(rows))
        for offset, value in zip(offsets, plain[count:], strict=True):
            moved[offset.rows] = value
        found = [step_time(rows[i].read.costs, known, simulated=False).step_time_s for i in which.tolist()]
        return np.log(found) + moved[which]

    expected = np.array([u.known.plain(u.known.expected) for u in everything])
    begin = expected
    if start is not None:
        begin = np.array([u.known.plain(start.table.get(u.known.name, u.known.expected)) for u in everything])
    spread = np.array([u.known.spread for u in everything])
    found = _solve(predicted, logs, _weights(rows), begin, expected, spread, [u.rows for u in everything])
    return constants(found)


def _unknowns(rows: Sequence[Timed]) -> list[_Unknown]:
    everywhere = np.arange(len(rows))
    found = [_Unknown(known, everywhere) for known in PRIORS]
    for known in PRIORS:
        kinds: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            for kind in _kinds(known, row):
                kinds.setdefault(kind, []).append(i)
        for kind, members in sorted(kinds.items()):
            if len(members) >= LEAST_ROWS:
                own = Prior(f"{known.name}@{kind}", 1.0, _spread(known, kind))
                found.append(_Unknown(own, np.array(members)))
    return found


def _offsets(rows: Sequence[Timed]) -> list[_Unknown]:
    """Each source's offset, 1 for none."""
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.source, []).append(i)
    return [_Unknown(Prior(name, 1.0, SPREAD_OF_SOURCES), np.array(own)) for name, own in sorted(members.items())]


def _spread(known: Prior, kind: str) -> float:
    if known.by != "device":
        return SPREAD_OF_LINKS
    return SPREAD_OF_GENERATIONS if kind in ARCHITECTURES else SPREAD_OF_DEVICES


def _kinds(known: Prior, row: Timed) -> tuple[str, ...]:
    costs = row.read.costs
    if known.by == "device":
        return costs.device
    return {"link": (costs.link,), "network": (costs.network,)}.get(known.by, ())


def _weights(rows: Sequence[Timed]) -> Array:
    counts = Counter(row.source for row in rows)
    return np.array([2 / np.sqrt(counts[row.source]) for row in rows])


def _solve(
    predicted: Callable[[Array, NDArray[np.intp]], Array],
    logs: Array,
    weights: Array,
    begin: Array,
    expected: Array,
    spread: Array,
    felt: Sequence[NDArray[np.intp]],
) -> Array:
    """Levenberg-Marquardt with Huber's weights and a normal expectation of each unknown."""
    everything = np.arange(len(logs))

    def cost(plain: Array, now: Array) -> float:
        away = np.abs(now - logs)
        loss = np.where(away < OUTLIER, away**2, OUTLIER * (2 * away - OUTLIER))
        return float((weights * loss).sum() + ((NOISE * (plain - expected) / spread) ** 2).sum())

    plain = begin.copy()
    now = predicted(plain, everything)
    best, damping = cost(plain, now), 1e-2
    for _ in range(ROUNDS):
        jacobian = np.zeros((len(logs), len(plain)))
        for j, rows in enumerate(felt):
            moved = plain.copy()
            moved[j] += STEP
            jacobian[rows, j] = (predicted(moved, rows) - now[rows]) / STEP
        residual = now - logs
        weight = weights * np.minimum(1.0, OUTLIER / np.maximum(np.abs(residual), 1e-9))
        matrix = (jacobian.T * weight) @ jacobian + np.diag((NOISE / spread) ** 2)
        gradient = (jacobian.T * weight) @ residual + NOISE**2 * (plain - expected) / spread**2
        before = best
        for _ in range(TRIES):
            there = plain - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            after = predicted(there, everything)
            if (reached := cost(there, after)) < best:
                plain, now, best, damping = there, after, reached, damping / 3
                break
            damping *= 4
        if before - best < 1e-4 * before:
            break
    return plain


def fit_closed(rows: Sequence[Timed]) -> Closed:
    """The seven constants of the closed form."""
    names = list(Closed.__dataclass_fields__)
    start = np.log([getattr(Closed(), name) for name in names])

    def predicted(plain: Array, which: NDArray[np.intp]) -> Array:
        known = Closed.of(dict(zip(names, np.exp(plain).tolist(), strict=True)))
        return np.log([max(1e-9, closed_form_s(rows[i].read.run, known)) for i in which.tolist()])

    logs = np.log([row.seconds for row in rows])
    felt = [np.arange(len(rows))] * len(names)
    found = _solve(predicted, logs, _weights(rows), start, start, np.full(len(names), 0.7), felt)
    return Closed.of(dict(zip(names, np.exp(found).tolist(), strict=True)))


def steady(rows: Sequence[Timed]) -> list[Timed]:
    """Rows of sources that repeat themselves."""
    return [row for row in rows if row.source not in UNSTEADY]


def write(constants: Constants, closed: Closed, sources: Sequence[str], path: Path) -> None:
    """Write the shipped file."""
    lines = [
        f"# Written by `python -m benchmarks.fit_steps` from training runs published by {', '.join(sources)}.",
        "",
        "[constants] # the common value, and `name@which` the factor of a generation, device or link",
        *(f'"{name}" = {value:.4g}' for name, value in sorted(constants.table.items())),
        "",
        "[closed_form] # the baseline with seven constants",
        *(f"{name} = {getattr(closed, name):.4g}" for name in Closed.__dataclass_fields__),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Fit and write."""
    rows = steady(timed_rows([Path(name) for name in sys.argv[1:]]))
    write(fit(rows), fit_closed(rows), sorted({row.source for row in rows}), profiles_folder() / "steps.toml")


if __name__ == "__main__":
    main()
