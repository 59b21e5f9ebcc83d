"""Changes in place made functional, through views: the base and its other views are made anew from what was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.errors import TraceError
from autopar.graph import Argument, Op, Ref, TensorSpec
from autopar.trace.flat import Item, rename

_RESHAPES = {"view", "unsqueeze", "squeeze", "unflatten"}
"""Views of the same elements in the same order."""
_SAME = {"alias", "detach"}
_PARTS = {"split", "split_with_sizes", "chunk", "unbind"}
_CERTAIN = _RESHAPES | _SAME | _PARTS | {"slice", "select", "narrow", "transpose", "permute", "t", "expand"}
_VIEWS = _CERTAIN | {"reshape", "flatten", "_unsafe_view", "contiguous", "to", "dropout"}
"""Ops whose result may share storage with their first operand; other than the certain ones they may as well copy."""


@dataclass(frozen=True)
class _View:
    """Result `part` of `op`, which is a view of `parent`; names are those of the trace."""

    parent: str
    op: Op
    part: int


class Writes:
    """Follows views through a list of operators, and says what a change in place makes new."""

    def __init__(self, items: Iterable[Item], values: dict[str, TensorSpec]) -> None:
        self.values = values
        self._views: dict[str, _View] = {}
        self._last_read: dict[str, int] = {}
        for position, item in enumerate(items):
            read = item.operands if isinstance(item, Op) else item.inputs
            self._last_read |= dict.fromkeys(read, position)

    def note(self, op: Op) -> None:
        """Remember a view; `op` has the names of the trace."""
        if (
            _name(op) in _VIEWS
            and op.operands
            and self.values[op.operands[0]].dtype == self.values[op.results[0]].dtype
        ):
            self._views |= {result: _View(op.operands[0], op, i) for i, result in enumerate(op.results)}

    def after(self, op: Op, changed: str, position: int, names: dict[str, str]) -> list[Op]:
        """Ops that bring base and views of `changed` up to date; `names` learns what each is called now.

        `op` (at `position`) has written `changed`, a name of the trace, of which `names` has the new value already.
        """
        made: list[Op] = []
        child, fresh = changed, {changed}
        while child in self._views:
            view = self._views[child]
            if _name(view.op) not in _CERTAIN:
                if self._last_read_below(self._root(child), but=view) > position:
                    raise _uncertain(view, op)
                break
            made.append(self._into_base(view, names[child], op, names))
            names[view.parent] = made[-1].results[0]
            fresh.add(view.parent)
            child = view.parent
        for name, view in list(self._views.items()):
            if name in fresh or view.parent not in fresh:
                continue
            fresh.add(name)  # parents come before their views
            if self._last_read_below(name) > position:
                if _name(view.op) not in _CERTAIN:
                    raise _uncertain(view, op)
                made.append(self._again(view, names))
                names |= dict(zip(view.op.results, made[-1].results, strict=True))
        return made

    def _root(self, name: str) -> str:
        while name in self._views:
            name = self._views[name].parent
        return name

    def _last_read_below(self, name: str, but: _View | None = None) -> int:
        """Position of the last reader of a value or of any view of it other than `but`."""
        below = (self._last_read_below(n, but) for n, v in self._views.items() if v.parent == name and v != but)
        return max([self._last_read.get(name, -1), *below])

    def _again(self, view: _View, names: dict[str, str]) -> Op:
        """The view's op on the new value of its parent."""
        results = tuple(self._new(r, self.values[r]) for r in view.op.results)
        return replace(rename(view.op, names), name=results[0], results=results)

    def _into_base(self, view: _View, written: str, op: Op, names: dict[str, str]) -> Op:
        """The op that makes the parent's new value from what was written to the view."""
        kind, spec = _name(view.op), self.values[view.parent]
        parent = Ref(names.get(view.parent, view.parent))
        target: str
        args: tuple[Argument, ...]
        place = _place(view, self.values)
        if kind in _RESHAPES:
            target, args = "aten.view.default", (Ref(written), tuple(e if e.is_batch else e.fixed for e in spec.shape))
        elif kind in _SAME or (kind == "slice" and spec == self.values[view.op.results[0]]):  # all of the dim
            target, args = "aten.alias.default", (Ref(written),)
        elif kind in ("transpose", "t"):
            target, args = "aten.transpose.int", (Ref(written), *(view.op.args[1:] or (0, 1)))
        elif kind == "permute":
            order = [int(d) % len(spec.shape) for d in view.op.args[1]]  # type: ignore[union-attr,arg-type]
            target, args = "aten.permute.default", (Ref(written), tuple(order.index(d) for d in range(len(order))))
        elif isinstance(place, tuple):
            target, args = "aten.slice_scatter.default", (parent, Ref(written), *place)
        elif place is not None:
            dim = view.op.args[1] if len(view.op.args) > 1 else 0
            target, args = "aten.select_scatter.default", (parent, Ref(written), dim, place)
        else:
            raise TraceError(
                f"{op.module or 'the model'}: {op.target} writes to a tensor through {view.op.target}, which isn't "
                "supported. Write the change without an in-place operator (for example torch.where)."
            )
        result = self._new(view.parent, spec)
        return Op(result, target, args, (), (result,), (None,), module=op.module)

    def _new(self, name: str, spec: TensorSpec) -> str:
        base, n = name.rpartition(":")[2].replace(".", "_"), 1
        while f"{base}@{n}" in self.values:
            n += 1
        self.values[f"{base}@{n}"] = spec
        return f"{base}@{n}"


def _uncertain(view: _View, op: Op) -> TraceError:
    return TraceError(
        f"{op.module or 'the model'}: {op.target} writes to a tensor that {view.op.target} may or may not share with "
        "another that is read later. Write the change without an in-place operator (for example torch.where)."
    )


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _place(view: _View, values: dict[str, TensorSpec]) -> tuple[Argument, ...] | Argument:
    """What the view takes of its parent: (dim, start, end, step) of a slice, or the index of a `select`; None: neither.

    The dim of a `select` or `unbind` is the op's own.
    """
    op, kind = view.op, _name(view.op)
    dim = op.args[1] if len(op.args) > 1 else 0
    if kind == "slice":
        given = dict(zip(("dim", "start", "end", "step"), op.args[1:], strict=False)) | dict(op.kwargs)
        return given.get("dim", 0), given.get("start"), given.get("end"), given.get("step", 1)
    if kind == "narrow" and isinstance(op.args[2], int) and isinstance(op.args[3], int):
        return dim, op.args[2], op.args[2] + op.args[3], 1
    if kind == "select":
        return op.args[2]
    if kind == "unbind":
        return view.part
    if kind in _PARTS:
        along = dict(op.kwargs).get("dim", op.args[2] if len(op.args) > 2 else 0)
        sizes = [values[r].shape[along] for r in op.results]  # type: ignore[index]
        if not any(size.is_batch for size in sizes):
            start = sum(size.fixed for size in sizes[: view.part])
            return along, start, start + sizes[view.part].fixed, 1
    return None
