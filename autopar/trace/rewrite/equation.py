"""What the letters of an einsum's equation say. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

Term = tuple[str, ...]
"""A label for each dim of a tensor: a letter, or `.n` for dim n (counted from the last) of what `...` stands for."""


def terms_of(equation: str, ranks: Sequence[int]) -> tuple[list[Term], Term]:
    """Labels of the operands, which have `ranks[i]` dims, and of the result.

    An equation without `->` has, as in NumPy, the labels that occur once, in alphabetical order, behind `...`.
    """
    left, arrow, right = equation.replace(" ", "").replace("...", ".").partition("->")
    spreads = [rank - len(text.replace(".", "")) for text, rank in zip(left.split(","), ranks, strict=True)]
    operands = [_term(text, spread) for text, spread in zip(left.split(","), spreads, strict=True)]
    widest = max((s for s, text in zip(spreads, left.split(","), strict=True) if "." in text), default=0)
    if arrow:
        return operands, _term(right, widest)
    letters = [c for c in left if c.isalpha()]
    once = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return operands, _term(("." if widest else "") + once, widest)


def _term(text: str, spread: int) -> Term:
    before, dots, after = text.partition(".")
    return (*before, *(f".{n}" for n in reversed(range(spread if dots else 0))), *after)
