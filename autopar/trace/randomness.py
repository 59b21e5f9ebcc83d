"""Operators that draw random numbers: only those whose draws can be made a function of place may be in a plan."""

from __future__ import annotations

import torch

from autopar.graph import Op
from autopar.trace.flat import Flat
from autopar.trace.run import argument, overload
from autopar.trace.sizes import OperatorError

DRAWN_BY_PLACE = ("aten.dropout.default", "aten.native_dropout.default")
"""Operators with a kernel that draws the same numbers in every layout and in every run."""
_OFF = {"p": 0, "dropout_p": 0, "dropout": 0, "train": False, "training": False}
"""Arguments, and the value under which an operator that has them draws nothing."""


def refuse_random(flat: Flat) -> None:
    """Raise TraceError naming module and operator where one draws numbers that ranks could not agree on."""
    for item in flat.items:
        if isinstance(item, Op) and item.target not in DRAWN_BY_PLACE and draws(item):
            raise OperatorError(
                f"{item.target} draws random numbers, which would differ between ranks and when activations are "
                f"recomputed. Give them to the model as an input, or use torch.nn.Dropout.",
                item.module,
            )


def draws(op: Op) -> bool:
    """Whether `op` draws random numbers, its arguments considered."""
    if torch.Tag.nondeterministic_seeded not in overload(op.target).tags:
        return False
    names = {declared.name for declared in overload(op.target)._schema.arguments}
    return not any(name in names and argument(op, name) == off for name, off in _OFF.items())
