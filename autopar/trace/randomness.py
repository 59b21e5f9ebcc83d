"""Operators that draw random numbers: all ranks must draw the same, and so must what runs again in a backward pass."""

from __future__ import annotations

import torch

from autopar.graph import Op
from autopar.trace.opaque.operator import OPAQUE, form_of
from autopar.trace.run import argument, overload

DRAWN_BY_PLACE = ("aten.dropout.default", "aten.native_dropout.default")
"""Operators with a kernel that draws the same numbers in every layout and in every run."""
_OFF = {"p": 0, "dropout_p": 0, "dropout": 0, "train": False, "training": False}
"""Arguments, and the value under which an operator that has them draws nothing."""


def draws(op: Op) -> bool:
    """Whether `op` draws random numbers, its arguments considered."""
    if op.target == OPAQUE:
        return form_of(str(op.args[1])).draws
    if not op.target.startswith("aten.") or torch.Tag.nondeterministic_seeded not in overload(op.target).tags:
        return False
    names = {declared.name for declared in overload(op.target)._schema.arguments}
    return not any(name in names and argument(op, name) == off for name, off in _OFF.items())


def draws_whole(op: Op) -> bool:
    """Whether `op` draws the numbers of all samples at once: only whole, from one seed, do ranks draw the same."""
    return op.target not in DRAWN_BY_PLACE and draws(op)
