"""autopar finds how to split a PyTorch model over many devices, and builds the module that runs that way.

Everything here is loaded when first used, so that `import autopar` is quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import Plan, estimate, optimize, plan, register_rule, verify
    from autopar.checkpoints import Checkpoints, load_safetensors
    from autopar.cluster import Cluster
    from autopar.elastic import Elastic
    from autopar.emit.on_shards import on_shards, on_wholes
    from autopar.formulate.config import ManualConfig

__version__ = "0.1.0"

__all__ = [
    "Checkpoints", "Cluster", "Elastic", "ManualConfig", "Plan", "__version__", "estimate", "load_safetensors",
    "on_shards", "on_wholes", "optimize", "plan", "register_rule", "verify",
]  # fmt: skip

_HOMES = {
    "Checkpoints": "autopar.checkpoints",
    "Cluster": "autopar.cluster",
    "Elastic": "autopar.elastic",
    "ManualConfig": "autopar.formulate.config",
    "Plan": "autopar.api",
    "estimate": "autopar.api",
    "load_safetensors": "autopar.checkpoints",
    "on_shards": "autopar.emit.on_shards",
    "on_wholes": "autopar.emit.on_shards",
    "optimize": "autopar.api",
    "plan": "autopar.api",
    "register_rule": "autopar.api",
    "verify": "autopar.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `autopar.plan` and `autopar.verify` functions, which importing the modules of those names would replace."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
