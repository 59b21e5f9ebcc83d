"""Nested Python data (dicts, sequences, named tuples, dataclasses) as a flat list of leaves with readable paths."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Rebuild = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True)
class Nested:
    """Leaves of a structure in order; `paths[i]` is the dotted path of `leaves[i]` ('' for a bare leaf)."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    _rebuild: Rebuild

    def rebuild(self, leaves: tuple[Any, ...] | list[Any]) -> Any:
        """The same structure with other leaves (as many, in the same order)."""
        return self._rebuild(iter(leaves))


def flatten(data: object) -> Nested:
    """Flatten `data`; anything that is not a dict, list, tuple or dataclass instance is a leaf."""
    found: list[tuple[str, Any]] = []
    rebuild = _collect(data, "", found)
    return Nested(tuple(p for p, _ in found), tuple(v for _, v in found), rebuild)


def _collect(data: Any, path: str, found: list[tuple[str, Any]]) -> Rebuild:
    parts = _parts(data)
    if parts is None:
        found.append((path, data))
        return next
    children, make = parts
    rebuilds = [_collect(child, f"{path}.{key}" if path else str(key), found) for key, child in children.items()]
    return lambda leaves: make([rebuild(leaves) for rebuild in rebuilds])


def _parts(data: Any) -> tuple[dict[Any, Any], Callable[[list[Any]], Any]] | None:
    """Children by key and how to make the container from new children; None for a leaf."""
    if isinstance(data, Mapping):
        keys = list(data)
        if dataclasses.is_dataclass(data):  # transformers' ModelOutput is both
            return dict(data), lambda values: type(data)(**dict(zip(keys, values, strict=True)))
        return dict(data), lambda values: dict(zip(keys, values, strict=True))
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return dict(zip(data._fields, data, strict=True)), lambda values: type(data)(*values)
    if type(data) in (tuple, list):
        return dict(enumerate(data)), type(data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [f.name for f in dataclasses.fields(data)]
        return {n: getattr(data, n) for n in names}, lambda values: _with_fields(data, names, values)
    return None


def _with_fields(data: Any, names: list[str], values: list[Any]) -> Any:
    changed = copy.copy(data)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(changed, name, value)
    return changed
