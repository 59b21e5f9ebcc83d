"""From a module and example inputs to an `OpGraph`. Importing the package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.trace.capture import trace as trace
    from autopar.trace.models.spec import load_model as load_model

__all__ = ["load_model", "trace"]


def __getattr__(name: str) -> Any:
    if name == "trace":
        from autopar.trace.capture import trace

        return trace
    if name == "load_model":
        from autopar.trace.models.spec import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
