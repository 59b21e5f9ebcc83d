"""What modules hold beside themselves: on their classes and in the files that these stand in (caches, counters)."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAPPINGS = (dict, OrderedDict, defaultdict)
_COLLECTIONS = (tuple, list, set, frozenset)
_NO_DATA = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.GetSetDescriptorType, property,
    classmethod, staticmethod, nn.Module,
)  # fmt: skip


class Beside:
    """What `holders` of a module hold.

    Plain data counts by value, the entries of collections and the attributes of objects by identity. What was seen is
    kept alive, so that identities stay unique.
    """

    def __init__(self, holders: Sequence[Mapping[str, Any]]) -> None:
        self._seen: list[Any] = []
        self.facts = tuple(
            (i, name, self._fact(value))
            for i, holder in enumerate(holders)
            for name, value in list(holder.items())
            if not name.startswith("__") and not isinstance(value, _NO_DATA)
        )

    def _fact(self, value: Any) -> object:
        if type(value) in _PLAIN:
            return value
        self._seen.append(value)
        if type(value) in _MAPPINGS:
            return (id(value), *self._identities([*value, *value.values()]))
        if type(value) in _COLLECTIONS:
            return (id(value), *self._identities([*value]))
        return (id(value), *self._identities([*getattr(value, "__dict__", {}).values()]))

    def _identities(self, values: list[Any]) -> Iterator[int]:
        self._seen.append(values)
        return map(id, values)


def holders(module: nn.Module) -> list[Mapping[str, Any]]:
    """What the classes of `module` and of those in it hold, and the files that define them, torch's aside."""
    kinds = dict.fromkeys(kind for inner in module.modules() for kind in type(inner).__mro__)
    own = [kind for kind in kinds if kind is not object and kind.__module__.partition(".")[0] != "torch"]
    files = dict.fromkeys(kind.__module__ for kind in own)
    return [*map(vars, own), *(vars(sys.modules[name]) for name in files if name in sys.modules)]
