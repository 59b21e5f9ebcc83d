"""Which submodules are repeated blocks, and which of them compute the same thing.

Blocks are compared by what they do: one forward pass on meta tensors records every operator call inside a block, with
operands named by where they come from (argument, parameter, earlier result). Attributes need not be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.trace import marker
from autopar.trace.failure import is_own_bug, reason_of
from autopar.trace.loss import Root
from autopar.trace.nested import flatten
from autopar.trace.torch_private import as_if_exporting, storage_id


@dataclass(frozen=True)
class Block:
    """A repeated block: its path in the model and the kind of computation it is; `first` of its kind or not."""

    path: str
    kind: int
    first: bool
    build: marker.BlockOutput = field(compare=False, repr=False)


def repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Candidates: the outermost children of containers of which at least two have equal classes and parameters."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not _inside(path, found):
            children = {f"{path}.{n}" if path else n: c for n, c in module.named_children() if _is_block(c)}
            counts = Counter(map(_shape_key, children.values()))
            if counts and counts.most_common(1)[0][1] > 1:
                found |= children
    return found


def _inside(path: str, found: dict[str, nn.Module]) -> bool:
    return any(path == block or path.startswith(f"{block}.") for block in found)


def _is_block(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None


def _shape_key(module: nn.Module) -> tuple[Any, ...]:
    parameters = module.named_parameters(remove_duplicate=False)
    return (type(module), *((name, tuple(p.shape), p.dtype) for name, p in parameters))


def find(root: Root, tensors: tuple[Tensor, ...]) -> tuple[list[Block], str]:
    """Run `root` once on meta `tensors` and sort its repeated blocks into kinds.

    Blocks called other than once are left out (they are not places in a chain). Of a model that can't be run under the
    recorder no blocks are known; the text then says why, and it is traced whole.
    """
    candidates = repeated(root.model)
    recordings: dict[str, _Recording] = {}
    if candidates:
        try:
            recordings = _record(root, candidates, tensors)
        except Exception as error:  # whatever is wrong with the model, tracing it whole says so with the right place
            if is_own_bug(error):
                raise
            return [], f"equal blocks could not be told ({reason_of(error)}): each is traced"
    kinds: dict[tuple[Any, ...], int] = {}
    blocks = []
    for path, recording in recordings.items():
        if recording.calls != 1 or recording.build is None:
            continue
        signature = recording.signature()
        first = signature not in kinds
        kind = kinds.setdefault(signature, marker.new_kind() if first else -1)
        blocks.append(Block(path, kind, first, recording.build))
    return blocks, ""


def install(root: Root, blocks: list[Block]) -> None:
    """Put the markers into `root` (a copy that is thrown away): `index` of a marker is the position in `blocks`."""
    for index, block in enumerate(blocks):
        module = root.model.get_submodule(block.path)
        if block.first:
            marker.trace_in_full(module, block.kind, index)
        else:
            marker.stand_in(module, block.build, block.kind, index)
    _drop_parameters(root, {root.model.get_submodule(b.path) for b in blocks if not b.first})


def _drop_parameters(root: Root, standing_in: set[nn.Module]) -> None:
    """Take the parameters of modules that will not run out of the export, whose cost grows with their number."""
    running: set[nn.Module] = set()
    waiting: list[nn.Module] = [root]
    while waiting:
        module = waiting.pop()
        if module not in running and module not in standing_in:
            running.add(module)
            waiting += module.children()
    for module in root.modules():
        if module not in running:
            module._parameters.clear()
            module._buffers.clear()


class _Recording:
    """What one block did."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        self.build: marker.BlockOutput | None = None
        self._facts: list[Any] = []
        self._labels: dict[int, object] = {}
        self._alive: list[Any] = []  # keeps ids unique
        self._arguments: tuple[Any, ...] = ()
        self._changes_argument = False
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            self._facts.append((name, self._label(tensor, name), _metadata(tensor)))

    def signature(self) -> tuple[Any, ...]:
        return tuple(self._facts)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls += 1
        nested = flatten([args, kwargs])
        self._arguments = nested.leaves
        for i, (path, leaf) in enumerate(zip(nested.paths, nested.leaves, strict=True)):
            self._facts.append((path, self._argument(i, leaf)))

    def leave(self, output: Any) -> None:
        nested = flatten(output)
        known = (Tensor, int, float, str, bool, type(None))
        if all(isinstance(leaf, known) for leaf in nested.leaves) and not self._changes_argument:
            self.build = marker.output_like(self._arguments, output)
        for path, leaf in zip(nested.paths, nested.leaves, strict=True):
            self._facts.append((path, self._encode(leaf), _metadata(leaf) if isinstance(leaf, Tensor) else None))

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        fact = (func, self._encode(args), self._encode(tuple(kwargs.items())))
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            owned = {storage_id(a) for a in self._arguments if isinstance(a, Tensor)}
            self._changes_argument |= storage_id(args[0]) in owned
        for i, made in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(made, Tensor):
                self._label(made, (len(self._facts), i))
        self._facts.append(fact)

    def _argument(self, i: int, leaf: Any) -> object:
        if not isinstance(leaf, Tensor):
            return self._encode(leaf)
        # What gradients do not reach (masks, positions, rotary tables) must be the very same for all of a kind.
        same = None if leaf.requires_grad else id(leaf)
        return (self._label(leaf, ("argument", i)), same, _metadata(leaf))

    def _label(self, tensor: Tensor, label: object) -> object:
        self._alive.append(tensor)
        return self._labels.setdefault(id(tensor), label)

    def _encode(self, value: Any) -> object:
        if isinstance(value, Tensor):
            self._alive.append(value)
            return self._labels.get(id(value), ("outside", id(value)))
        if isinstance(value, (tuple, list)):
            return tuple(self._encode(v) for v in value)
        if value is None or isinstance(value, (int, float, str, bool, torch.dtype, torch.device)):
            return (type(value), value)
        self._alive.append(value)
        return (type(value), id(value))


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


class _Recorder(TorchDispatchMode):
    """Tells the current block's recording of each call. Results of equal calls are remembered: blocks repeat them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: _Recording | None = None
        self._known: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        if self.current is not None:
            self.current.note(func, args, kwargs or {}, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = (func, _hashable(args), _hashable(tuple(kwargs.items())))
        known = self._known.get(key)
        if known is not None:
            shape, stride, dtype = known
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if type(result) is Tensor and _is_fresh(func):
            self._known[key] = (tuple(result.shape), result.stride(), result.dtype)
        return result


def _is_fresh(func: Any) -> bool:
    """Whether results share no storage with operands."""
    returns = func._schema.returns
    return not func._schema.is_mutable and all(r.alias_info is None for r in returns)


def _hashable(value: Any) -> Any:
    """`value` with tensors replaced by their metadata."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    return (type(value), value)


def _record(root: Root, candidates: dict[str, nn.Module], tensors: tuple[Tensor, ...]) -> dict[str, _Recording]:
    recordings = {path: _Recording(module) for path, module in candidates.items()}
    recorder = _Recorder()
    handles: list[Any] = []
    for path, module in candidates.items():
        handles += _hooks(module, recordings[path], recorder)
    try:
        with as_if_exporting(), recorder:
            root(*tensors)
    finally:
        for handle in handles:
            handle.remove()
    return recordings


def _hooks(module: nn.Module, recording: _Recording, recorder: _Recorder) -> Iterator[Any]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.enter(args, kwargs)
        recorder.current = recording

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        recorder.current = None
        recording.leave(output)

    yield module.register_forward_pre_hook(enter, with_kwargs=True)
    yield module.register_forward_hook(leave)
