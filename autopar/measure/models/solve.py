"""Constants of a form from timings: robust least squares in the logarithm of seconds, with what was expected before.

Levenberg-Marquardt with Huber's weights (P. J. Huber, "Robust estimation of a location parameter", 1964).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.measure.models.form import Array, Form, Hardware, Sizes

NOISE = 0.05
"""Spread of timings about a form that is right, in the logarithm."""

OUTLIER = 0.15
"""Residuals beyond count by their size, not by its square."""

STEP = 1e-3
ROUNDS, TRIES = 40, 8


@dataclass(frozen=True)
class _Task:
    form: Form
    sizes: Sizes
    hardware: Hardware
    logarithm: Array
    weight: Array
    expected: Array

    def logs(self, plain: Array) -> Array:
        return np.log(self.form.seconds(self.form.values(plain), self.sizes, self.hardware))

    def cost(self, plain: Array) -> float:
        away = np.abs(self.logs(plain) - self.logarithm)
        loss = np.where(away < OUTLIER, away**2, OUTLIER * (2 * away - OUTLIER))
        return float((self.weight * loss).sum() + self.surprise(plain) @ self.surprise(plain))

    def surprise(self, plain: Array) -> Array:
        spread = np.array([c.spread for c in self.form.constants])
        result: Array = NOISE * (plain - self.expected) / spread
        return result

    def normal_equations(self, plain: Array) -> tuple[Array, Array]:
        now = self.logs(plain)
        slopes = [(self.logs(plain + row) - now) / STEP for row in STEP * np.eye(len(plain))]
        jacobian, residual = np.stack(slopes, axis=1), now - self.logarithm
        weight = self.weight * np.minimum(1.0, OUTLIER / np.maximum(np.abs(residual), 1e-9))
        spread = np.array([c.spread for c in self.form.constants])
        matrix = (jacobian.T * weight) @ jacobian + np.diag((NOISE / spread) ** 2)
        return matrix, (jacobian.T * weight) @ residual + NOISE * self.surprise(plain) / spread


def solve(
    form: Form, sizes: Sizes, hardware: Hardware, measured_s: Array, weight: Array, expected: Array | None = None
) -> Array:
    """Values of the form's constants that explain `measured_s`, shape (timings,), starting from `expected` values."""
    plain = form.plain(form.start() if expected is None else expected)
    task = _Task(form, sizes, hardware, np.log(measured_s), weight, plain)
    cost, damping = task.cost(plain), 1e-2
    for _ in range(ROUNDS):
        matrix, gradient = task.normal_equations(plain)
        before = cost
        for _ in range(TRIES):
            there = plain - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            if (reached := task.cost(there)) < cost:
                plain, cost, damping = there, reached, damping / 3
                break
            damping *= 4
        if before - cost < 1e-5 * before:
            break
    return form.values(plain)
