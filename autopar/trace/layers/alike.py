"""What makes two modules compute the same on the same arguments, and what a module leaves behind beside its results.

A module's `forward` is its class's code over its attributes. Where modules of the same classes, parameters and
attributes are called alike they do the same. Attributes that differ (the number of a layer) matter only if they are
read, which is watched.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Place: TypeAlias = tuple[str, str]
"""A submodule's path in a module, and the name of an attribute of it."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
_CHILDREN = ("_modules", "_parameters", "_buffers")
_SEQUENCES = (tuple, list, torch.Size)
_MAPPINGS = (dict, OrderedDict)
_BY_IDENTITY = (Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Frozen:
    """Values as they were, to be compared: plain data by value, objects by identity and what they hold.

    Keeps what it has seen alive, so that identities stay unique.
    """

    def __init__(self, values: Mapping[Any, Any], own: Mapping[int, str] | None = None) -> None:
        """`values` by any keys; modules in `own` (by id) stand for their names."""
        self._own = own or {}
        self._seen: dict[int, Any] = {}
        self.facts = {key: self._fact(value) for key, value in values.items()}

    def _fact(self, value: Any) -> object:
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if type(value) in _SEQUENCES:
            return (type(value), *map(self._fact, value))
        if type(value) in (set, frozenset):
            return (type(value), frozenset(map(self._fact, value)))
        if type(value) in _MAPPINGS:
            return (type(value), *((self._fact(k), self._fact(v)) for k, v in value.items()))
        if isinstance(value, types.MethodType):
            return (self._fact(value.__func__), self._fact(value.__self__))
        if isinstance(value, functools.partial):
            return (functools.partial, self._fact(value.func), self._fact(value.args), self._fact(value.keywords))
        return self._object(value)

    def _object(self, value: Any) -> object:
        known = id(value) in self._seen
        self._seen[id(value)] = value
        name = self._own.get(id(value), id(value))
        if known or isinstance(value, _BY_IDENTITY) or not hasattr(value, "__dict__"):
            return name
        held = vars(value)
        if isinstance(value, nn.Module):
            held = {k: v for k, v in held.items() if k not in _CHILDREN}
        return name if id(value) in self._own else (name, self._fact(held))


def attributes(module: nn.Module) -> Frozen:
    """Every attribute (by place) of `module` and of those in it; parameters, buffers and submodules aside."""
    inside = dict(module.named_modules())
    places = {
        (path, name): value
        for path, inner in inside.items()
        for name, value in vars(inner).items()
        if name not in _CHILDREN
    }
    return Frozen(places, {id(inner): path for path, inner in inside.items()})


def attributes_at(module: nn.Module, places: Iterable[Place]) -> Frozen:
    """Those at `places`, as far as they are there."""
    inside = dict(module.named_modules())
    there = {(path, name): vars(inside[path])[name] for path, name in places if name in vars(inside[path])}
    return Frozen(there, {id(inner): path for path, inner in inside.items()})


def skeleton(module: nn.Module) -> tuple[Any, ...]:
    """Classes of a module and of all in it, by path."""
    return tuple((path, type(inner)) for path, inner in module.named_modules())


@contextmanager
def reads(module: nn.Module) -> Iterator[set[Place]]:
    """Yields a set to which the places are added that are read off `module`, or would be if they were there, inside.

    Reading all attributes of a module at once counts for each, and so does what can't be watched.
    """
    inside = {id(inner): (path, inner) for path, inner in module.named_modules()}
    classes = {type(inner) for _, inner in inside.values()}
    usual: Any = object.__getattribute__
    watched = {kind for kind in classes if kind.__getattribute__ is usual}
    found = {(p, name) for p, inner in inside.values() if type(inner) not in watched for name in vars(inner)}

    def read(self: Any, name: str) -> Any:
        if (own := inside.get(id(self))) is not None:
            path, module = own
            if name != "__dict__":
                found.add((path, name))
            elif sys._getframe(1).f_globals.get("__name__") != nn.Module.__module__:
                found.update((path, each) for each in object.__getattribute__(module, name))
        return object.__getattribute__(self, name)

    try:
        for each in watched:
            each.__getattribute__ = read  # type: ignore[assignment]
        yield found
    finally:
        for each in watched:
            del each.__getattribute__
