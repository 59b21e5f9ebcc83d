"""From a module and example inputs to an `OpGraph`."""

from autopar.trace.capture import trace

__all__ = ["trace"]
