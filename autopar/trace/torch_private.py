"""Every private name of torch that tracing uses; a test checks that each exists."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.export._trace import _compiling_state_context  # type: ignore[attr-defined]


def as_if_exporting() -> AbstractContextManager[None]:
    """Inside, `torch.compiler.is_exporting()` is true, so that models take the branches they take under export."""
    return _compiling_state_context()


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage share while it is alive."""
    return int(tensor.untyped_storage()._cdata)


HIGHER_ORDER = torch._ops.HigherOrderOperator
OVERLOAD = torch._ops.OpOverload
