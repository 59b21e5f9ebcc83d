"""Values of generated code as text: the same for all ranks of a stage, or picked by a rank's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from math import isinf, isnan
from typing import Any

import torch
from torch import fx

from autopar.emit.groups import Axes, StageGroups, refined
from autopar.plan import StagePlan
from autopar.shard.localize import CallInfo, Share

GROUP_FIELDS = {(CallInfo, "parts"), (Share, "group")}
"""Fields that hold the name of a process group."""
PARTS = ("dim", "lengths")
MOVES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (), "all_gather": PARTS, "reduce_scatter": PARTS, "slice": PARTS, "pad": PARTS, "divide": (),
    "all_to_all": ("dim", "to_dim", "lengths", "then"), "recut": (*PARTS, "then"),
}  # fmt: skip
"""What each kind of move is told beside its group."""
NAMES = {"slice": "split"}
"""Moves that files call otherwise than the operator does."""


class PaperGroups(StageGroups):
    """A stage's mesh as the rank at `place` sees it, without processes: groups are named by their axes."""

    def __init__(self, sizes: tuple[int, ...], place: tuple[int, ...], device: torch.device, letter: str = "d") -> None:
        self.sizes, self.coordinate, self.device = sizes, place, device
        self._letter = letter

    def name(self, axes: Axes) -> str:
        """For example `d0_d1`."""
        return "_".join(f"{self._letter}{a}" for a in axes)

    def over_primes(self, stage: StagePlan) -> StageGroups:
        """The rank's place among the prime factors of the axes."""
        sizes = tuple(axis.size for axis in refined(stage).mesh)
        index, place = self.index(self.all_axes), []
        for size in reversed(sizes):
            index, digit = divmod(index, size)
            place.append(digit)
        return PaperGroups(sizes, tuple(reversed(place)), self.device, "p")


class Speaker:
    """Writes the values that all ranks of a stage have at one point of their code, in the order of `places`.

    Notes the groups it names in `used`.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.places = list(product(*(range(n) for n in sizes)))
        self.used: set[str] = set()

    def value(self, values: Sequence[Any], node: Callable[[fx.Node], str]) -> str:
        """An argument; nodes are written by `node`."""
        first = values[0]
        if isinstance(first, fx.Node):
            return node(first)
        if isinstance(first, CallInfo | Share):
            return self._record(values, node)
        if isinstance(first, tuple | list) and len({len(v) for v in values}) == 1:
            return self._sequence(values, node)
        if isinstance(first, dict):
            pairs = (f"{k!r}: {self.value([v[k] for v in values], node)}" for k in first)
            return f"{{{', '.join(pairs)}}}"
        return self.picked([literal(v) for v in values])

    def _sequence(self, values: Sequence[Any], node: Callable[[fx.Node], str]) -> str:
        items = [self.value([v[i] for v in values], node) for i in range(len(values[0]))]
        if isinstance(values[0], list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' * (len(items) == 1)})"

    def _record(self, values: Sequence[Any], node: Callable[[fx.Node], str]) -> str:
        kind = type(values[0])
        said = []
        for field in kind._fields:
            each = [getattr(v, field) for v in values]
            if all(v == kind._field_defaults.get(field) for v in each):
                continue
            group = (kind, field) in GROUP_FIELDS
            said.append(f"{field}={self.group(each[0]) + '.name' if group else self.value(each, node)}")
        return f"{kind.__name__}({', '.join(said)})"

    def group(self, name: str) -> str:
        """The name of a group, noted."""
        self.used.add(name)
        return name

    def picked(self, texts: Sequence[str]) -> str:
        """One text, or a choice by this rank's place on as few axes as tell."""
        if len(set(texts)) == 1:
            return texts[0]
        for count in range(1, len(self.sizes) + 1):
            for axes in combinations(range(len(self.sizes)), count):
                found: dict[tuple[int, ...], set[str]] = {}
                for place, text in zip(self.places, texts, strict=True):
                    found.setdefault(tuple(place[a] for a in axes), set()).add(text)
                if all(len(one) == 1 for one in found.values()):
                    over = self.group("_".join(f"d{a}" for a in axes))
                    return f"pick({over}, {', '.join(text for one in found.values() for text in one)})"
        raise AssertionError("a place tells everything")  # pragma: no cover

    def moves(self, texts: Sequence[Sequence[str]]) -> str:
        """A list of moves; each rank has as many."""
        return f"[{', '.join(self._move(each) for each in zip(*texts, strict=True))}]"

    def _move(self, texts: Sequence[str]) -> str:
        kind, dim, to_dim, _, name = texts[0].split(" ", 4)
        cuts = [text.split(" ", 4)[3].split("/") for text in texts]
        parts = {"lengths": [c[0] for c in cuts], "then": [c[1] if len(c) > 1 else "" for c in cuts]}
        said = [self.group(name)]
        for word in MOVES[kind]:
            if word == "dim":
                said.append(f"dim={dim}")
            elif word == "to_dim":
                said.append(f"to_dim={to_dim}")
            elif any("," in part for part in parts[word]):
                said.append(f"{word}={self.picked([_lengths(part) for part in parts[word]])}")
        return f"{NAMES.get(kind, kind)}({', '.join(said)})"


def _lengths(part: str) -> str:
    return f"({part.replace(',', ', ')})" if "," in part else "()"


def literal(value: Any) -> str:
    """A constant as Python text."""
    if isinstance(value, float) and (isinf(value) or isnan(value)):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return "here.device"
    return str(value) if type(value).__module__ == "torch" else repr(value)
