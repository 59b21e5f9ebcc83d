"""What the choices of a stack problem hold at each moment of a step, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.engine.moments import REDUCING, UPDATING, Ints, Moment, held_at

if TYPE_CHECKING:
    from autopar.engine.stack_problem import Choices, StackProblem


NOTHING = -(1 << 60)
"""Less than any layer holds."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """Bytes at K moments: `base` (K,) whatever is chosen; for each run `held` (K, C) by one layer of each choice, and
    `extra` (K, C), of which the largest of all layers is held on top (`NOTHING` where the run has no part in it)."""

    base: Ints
    held: tuple[Ints, ...]
    extra: tuple[Ints, ...]

    @classmethod
    def of(cls, problem: StackProblem) -> Ledger:
        """Of all moments of a problem, in their order."""
        moments = problem.moments
        base = [problem.fixed_bytes + (m.backward.held_bytes if m.backward else 0) for m in moments]
        rows = [_rows(run.choices, moments, r, run.chunk) for r, run in enumerate(problem.runs)]
        return cls(np.array(base, dtype=np.int64), tuple(held for held, _ in rows), tuple(extra for _, extra in rows))

    def bytes(self, counts: Sequence[Ints]) -> Ints:
        """(K,): what is held with so many layers (C,) of each choice of each run."""
        held = sum((of @ n for of, n in zip(self.held, counts, strict=True)), self.base)
        on_top = [of[:, n > 0].max(axis=1, initial=NOTHING) for of, n in zip(self.extra, counts, strict=True)]
        total: Ints = held + np.max(on_top, axis=0)
        return total

    def take(self, rows: Sequence[Ints]) -> Ledger:
        """Of some choices of each run."""
        held = tuple(of[:, own] for of, own in zip(self.held, rows, strict=True))
        return Ledger(self.base, held, tuple(of[:, own] for of, own in zip(self.extra, rows, strict=True)))

    def hardest(self) -> Ledger:
        """Of the moments at which more may be held than at any other one."""
        every = np.concatenate([self.base[:, None], *self.held, *self.extra], axis=1)
        table = every[list({row.tobytes(): k for k, row in enumerate(every)}.values())]
        below = np.all(table[:, None] <= table[None], axis=2) & ~np.eye(len(table), dtype=np.bool_)
        left = table[~np.any(below, axis=1)]
        ends = np.cumsum([1, *(of.shape[1] for of in (*self.held, *self.extra))])
        base, *columns = np.split(left, ends[:-1], axis=1)
        return Ledger(base[:, 0], tuple(columns[: len(self.held)]), tuple(columns[len(self.held) :]))


def _rows(choices: Choices, moments: Sequence[Moment], run: int, chunk: int) -> tuple[Ints, Ints]:
    """`held` and `extra` of one run."""
    times = [held_at(moment, run, chunk) for moment in moments]
    figures = np.stack(
        [
            choices.static_bytes, choices.grad_bytes, choices.saved_bytes, choices.reduced_bytes,
            choices.update_bytes, choices.put_off_bytes, choices.late_bytes,
        ]
    )  # fmt: skip
    each = [(1, t.gradients, t.saved, t.reduced, t.update, t.put_off, -t.unmade) for t in times]
    held: Ints = np.array(each, dtype=np.int64) @ figures
    extra, changing = np.full_like(held, NOTHING), choices.changing
    turned = {turn: (turn.more(changing), turn.on_top(changing)) for turn in {t.turn for t in times} if turn}
    for k, (moment, own) in enumerate(zip(moments, times, strict=True)):
        if own.turn:
            held[k] += turned[own.turn][0]
        if moment == REDUCING:
            extra[k] = choices.step_bytes
        elif moment == UPDATING:
            extra[k] = 0
        elif moment.run == run:
            extra[k] = turned[own.turn][1] if own.turn else choices.transient_bytes
    return held, extra
