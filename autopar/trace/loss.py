"""Finding the scalar to minimise in what a model returns."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from autopar.trace.inputs import BoundInputs
from autopar.trace.nested import flatten

LossFn = Callable[..., Tensor]


@dataclass
class Outcome:
    """What `Root.forward` found: position of the loss among its results, and whether it is a stand-in.

    `unasked`: the path of that loss in the output where there was a loss_fn as well, which is then not called.
    `draws`: whether the model drew from Python's or numpy's random numbers, which a trace has as they were.
    """

    loss_at: int | None = None
    stands_in: bool = False
    unasked: str = ""
    draws: bool = False


class Root(nn.Module):
    """The model as a function of flat tensors that returns flat tensors, loss included.

    The loss is the scalar output, else the output called `loss`, else the first floating scalar in the output, else
    `loss_fn(output, ...)`, called with those inputs by name that it takes beyond its first parameter. Without any the
    sum of the floating outputs stands in, so that there is something to differentiate.
    """

    def __init__(self, model: nn.Module, inputs: BoundInputs, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self.outcome = Outcome()
        self._inputs = inputs
        self._loss_fns = () if loss_fn is None else (loss_fn,)  # a module in a tuple is no submodule

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of `BoundInputs.names` -> every tensor the model returns (and the loss)."""
        args, kwargs, extra = self._inputs.call(tensors)
        before = _random_state()
        output = self.model(*args, **kwargs)
        self.outcome.draws |= _random_state() != before
        nested = flatten(output)
        found = {p: v for p, v in zip(nested.paths, nested.leaves, strict=True) if isinstance(v, Tensor)}
        results = list(found.values())
        self.outcome.loss_at = _scalar(found)
        if self._loss_fns and self.outcome.loss_at is not None:
            self.outcome.unasked = list(found)[self.outcome.loss_at] or "its only output"
        for loss_fn in self._loss_fns if self.outcome.loss_at is None else ():
            named = dict(zip(self._inputs.names, tensors, strict=True)) | extra
            results.append(loss_fn(output, **_wanted(loss_fn, named)))
            self.outcome.loss_at = len(results) - 1
        if self.outcome.loss_at is None:
            results.append(_sum([r for r in results if r.is_floating_point()]))
            self.outcome.stands_in = True
        return tuple(results)


def _random_state() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:]


def _scalar(found: dict[str, Tensor]) -> int | None:
    scalars = [p for p, v in found.items() if v.ndim == 0 and v.is_floating_point()]
    chosen = "loss" if "loss" in scalars else scalars[0] if scalars else None
    return None if chosen is None else list(found).index(chosen)


def _wanted(loss_fn: LossFn, named: dict[str, Any]) -> dict[str, Any]:
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    parameters = list(inspect.signature(called).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return named
    return {p.name: named[p.name] for p in parameters[1:] if p.name in named}


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].sum()
    for value in values[1:]:
        total = total + value.sum()
    return total
