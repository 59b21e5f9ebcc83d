"""Lines of losses: rows may be split, and classes where a kernel gathers what the rows need of them."""

from __future__ import annotations

from autopar.shard.structured import LineMaker, Site, term


def cross_entropy(site: Site) -> str | None:
    """Rows and classes may be split; None with class weights or class probabilities."""
    target = site.operands[1]
    if len(site.operands) > 2 or len(target.shape) != max(site.rank - 1, 0) or "int" not in target.dtype:
        return None
    classes = "_" if site.argument(5, "label_smoothing", 0.0) else "v"
    rows = [f"n{i or ''}" for i in range(len(target.shape))]
    columns = " ".join([*rows[:1], classes, *rows[1:]])
    reduction = site.argument(3, "reduction", 1)
    kept = " ".join(rows) if reduction == 0 else ""
    notes = ["v: cross_entropy whole"] * (classes == "v")
    notes += [f"{row}: cross_entropy" for row in rows if reduction == 1]
    return f"{columns}, {' '.join(rows)} -> {kept} | {', '.join(notes)}"


def nll(site: Site) -> str | None:
    """Rows may be split unless their number is needed (a mean); None with class weights."""
    target = site.operands[1]
    reduction = site.argument(3, "reduction", 1)
    if len(site.operands) > 2 or reduction == 1 or len(target.shape) != site.rank - 1:
        return None
    rows = [f"n{i or ''}" for i in range(len(target.shape))]
    columns = " ".join([*rows[:1], "_", *rows[1:]])
    return f"{columns}, {' '.join(rows)} -> {' '.join(rows) if reduction == 0 else ''}"


def elementwise_loss(position: int) -> LineMaker:
    """A loss of pairs of elements, its reduction (none, mean or sum) an argument; None with weights or broadcasting."""

    def line(site: Site) -> str | None:
        if len(site.operands) != 2 or site.operands[0].shape != site.operands[1].shape:
            return None
        reduction = site.argument(position, "reduction", 1)
        kept = term(site.rank) if reduction == 0 else ""
        notes = [f"d{d}: mean_loss" for d in range(site.rank) if reduction == 1]
        return f"{term(site.rank)}, {term(site.rank)} -> {kept} | {', '.join(notes)}"

    return line
