"""The one-line notation of factor rules, and its binding to the shapes of an op.

    line     := term, term, ... -> term, ... [| note, note, ...]
    term     := [+] dim dim ...      one per tensor operand or result; surplus terms (absent optional operands) drop
    dim      := name | _ | ...       a factor, a dim that can't be split, or any number of leading dims
    note     := + | name: kernel | name: kernel whole | *: kernel | name!

`...` and terms longer than their tensor align to the right, as in broadcasting; the dims of `...` are the factors d0,
d1, ... from the left of the longest. A dim of length 1 is never split. Where dims of one factor differ in length (the
heads of grouped queries, the merged dim of a view), what can be dealt out is their greatest common divisor. A leading
`+` marks a term of a sum (a bias). Notes: `+` says that the op is linear in all its operands together, `name: kernel`
which kernel runs a split of that factor (`whole`: and returns whole results), `*: kernel` one that always runs, and
`name!` that the op can't run where a rank has nothing of that factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import ConfigError
from autopar.graph import Extent, TensorSpec
from autopar.shard.factors import LINEAR, Factor, Grains, OpRule, common_extent, grain_of

REST = "..."
FIXED = "_"
SOLID = "!"
_NOTE = re.compile(r"(\w+|\*): (\w+)( whole)?")


@dataclass(frozen=True)
class Line:
    """A parsed line. `notes` are (factor or `*`, kernel, whole); `linear` stands for the note `+`."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    added: frozenset[int]
    notes: tuple[tuple[str, str, bool], ...]
    linear: bool
    solid: frozenset[str] = frozenset()


def parse(text: str) -> Line:
    """Read a line; raises ConfigError that shows the line and what is wrong with it."""
    body, _, notes = text.partition("|")
    if body.count("->") != 1:
        raise ConfigError(f"factor rule {text!r}: needs exactly one '->' between operands and results.")
    left, right = ([term.split() for term in side.split(",")] for side in body.split("->"))
    added = frozenset(i for i, term in enumerate(left) if term[:1] == ["+"])
    operands = tuple(tuple(term[i in added :]) for i, term in enumerate(left))
    results = tuple(map(tuple, right))
    for term in (*operands, *results):
        _check_term(term, text)
    words = [note.strip() for note in notes.split(",") if note.strip()]
    solid = frozenset(word[:-1] for word in words if word.endswith(SOLID))
    noted = tuple(_note(w, text) for w in words if w != LINEAR and not w.endswith(SOLID))
    return Line(operands, results, added, noted, LINEAR in words, solid)


def _check_term(term: tuple[str, ...], text: str) -> None:
    wrong = [dim for dim in term if dim not in (REST, FIXED) and not dim.isidentifier()]
    twice = {dim for dim in term if dim != FIXED and term.count(dim) > 1}
    if wrong or twice:
        what = f"{wrong[0]!r} is no dim" if wrong else f"{min(twice)!r} stands twice in one term"
        raise ConfigError(f"factor rule {text!r}: {what}; a term has names, '_' and one '...', each name once.")


def _note(word: str, text: str) -> tuple[str, str, bool]:
    found = _NOTE.fullmatch(word)
    if not found:
        raise ConfigError(
            f"factor rule {text!r}: note {word!r} is not '+', 'name!', 'name: kernel' or 'name: kernel whole'."
        )
    return found[1], found[2], bool(found[3])


def bind(
    line: Line, operands: tuple[TensorSpec, ...], results: tuple[TensorSpec, ...], linear: bool = False
) -> OpRule | None:
    """The rule for tensors of these shapes; None when there are more tensors or dims than the line has places for.

    `linear` adds the factor `+` as the note does.
    """
    if len(operands) > len(line.operands) or len(results) != len(line.results):
        return None
    specs = (*operands, *results)
    terms = (*line.operands[: len(operands)], *line.results)
    longest = max((len(s.shape) - len(t) + 1 for s, t in zip(specs, terms, strict=True) if REST in t), default=0)
    named = [_name_dims(term, len(spec.shape), longest) for spec, term in zip(specs, terms, strict=True)]
    if any(names is None for names in named):
        return None
    dims = [list(zip(names or (), spec.shape, strict=True)) for names, spec in zip(named, specs, strict=True)]
    extents = _extents([pair for tensor in dims for pair in tensor])
    placed = tuple(tuple(n if n in extents and e != Extent(0, 1) else "" for n, e in tensor) for tensor in dims)
    factors = [Factor(name, extent) for name, extent in extents.items()]
    grains = tuple(
        tuple(grain_of(spec.shape[d], extents[n]) if n else 1 for d, n in enumerate(names))
        for spec, names in zip(specs, placed, strict=True)
    )
    if line.linear or linear:
        factors.append(Factor(LINEAR, Extent(0, 0)))
    return OpRule(
        tuple(factors), placed[: len(operands)], placed[len(operands) :], dict(_kernels(line, list(extents))),
        frozenset(name for name, _, whole in line.notes if whole), line.added, line.solid, _unless_all_one(grains),
    )  # fmt: skip


def _unless_all_one(grains: Grains) -> Grains:
    return grains if any(grain > 1 for tensor in grains for grain in tensor) else ()


def _name_dims(term: tuple[str, ...], rank: int, longest: int) -> tuple[str, ...] | None:
    """Names of a tensor's dims, right-aligned; `longest` is the largest number of dims any `...` stands for."""
    if REST not in term:
        return term[len(term) - rank :] if rank <= len(term) else None
    at, covered = term.index(REST), max(rank - len(term) + 1, 0)
    names = (*term[:at], *(f"d{i}" for i in range(longest - covered, longest)), *term[at + 1 :])
    return names[len(names) - rank :]


def _extents(dims: list[tuple[str, Extent]]) -> dict[str, Extent]:
    """What can be dealt out of each factor, in order of first mention; factors that can't be split are left out."""
    extents: dict[str, Extent | None] = {}
    for name, extent in dims:
        if name == FIXED or extent == Extent(0, 1):
            continue
        seen = extents.get(name, extent)
        extents[name] = common_extent(seen, extent) if seen else None
    return {name: extent for name, extent in extents.items() if extent and extent != Extent(0, 1)}


def _kernels(line: Line, names: list[str]) -> Iterator[tuple[str, str]]:
    for name, kernel, _ in line.notes:
        for each in (*names, "") if name == "*" else (name,):
            if each in names or not each:
                yield each, kernel
