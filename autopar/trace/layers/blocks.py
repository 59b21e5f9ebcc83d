"""Which submodules are repeated blocks, and which of them compute the same thing.

Blocks are compared by what they do: one forward pass on meta tensors records every operator call inside a block, with
operands named by where they come from (argument, parameter, earlier result). Only of blocks that are alike in all that
they read the first is run for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.trace import marker
from autopar.trace.failure import is_own_bug, reason_of
from autopar.trace.layers.alike import Frozen, Place, attributes, attributes_at, reads, skeleton
from autopar.trace.layers.beside import Beside, holders
from autopar.trace.layers.recording import Recorder, Recording
from autopar.trace.loss import Root
from autopar.trace.torch_private import as_if_exporting


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
    recordings: dict[str, Recording] = {}
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


def _record(root: Root, candidates: dict[str, nn.Module], tensors: tuple[Tensor, ...]) -> dict[str, Recording]:
    """What was recorded of the candidates that were called, in the order in which they were: the first is traced."""
    called: list[Recording] = []
    recordings = {path: Recording(module) for path, module in candidates.items()}
    recorder = Recorder()
    kin: dict[Any, list[str]] = {}
    for path, module in candidates.items():
        kin.setdefault((_shape_key(module), skeleton(module), vars(module).get("forward")), []).append(path)
    for paths in kin.values():
        family = _Kin(recorder, holders(candidates[paths[0]]), called)
        for path in paths:
            candidates[path].forward = family.forward(candidates[path], recordings[path])
    with as_if_exporting(), recorder:
        root(*tensors)
    paths_of = {id(recording): path for path, recording in recordings.items()}
    return {paths_of[id(recording)]: recording for recording in called}


@dataclass(frozen=True)
class _Known:
    """A block that was run: what it was given, what it held at the places that it read, and what lay beside it."""

    entered: tuple[Any, ...]
    read: frozenset[Place]
    held: Frozen
    beside: Beside
    recording: Recording


class _Kin:
    """Blocks of the same classes and parameters. Of those that are alike when they are called the first is run."""

    def __init__(self, recorder: Recorder, holders: Sequence[Mapping[str, Any]], called: list[Recording]) -> None:
        self._recorder, self._called = recorder, called
        self._holders = holders
        self._known: list[_Known] = []

    def forward(self, module: nn.Module, recording: Recording) -> Callable[..., Any]:
        """What is put in place of the block's own `forward`."""
        original: Callable[..., Any] = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._called.append(recording)
            recording.enter(args, kwargs)
            entered, beside = recording.signature(), Beside(self._holders)
            for known in self._known:
                alike = known.entered == entered and known.beside.facts == beside.facts
                if alike and attributes_at(module, known.read).facts == known.held.facts:
                    return recording.same_as(known.recording)
            before, given = attributes(module), Frozen({"": (args, kwargs)})
            self._recorder.current = recording
            with reads(module) as read:
                output = original(*args, **kwargs)
            self._recorder.current = None
            left = (attributes(module).facts, Frozen({"": (args, kwargs)}).facts) != (before.facts, given.facts)
            recording.leave(output, left or Beside(self._holders).facts != beside.facts)
            if recording.build is not None:
                places = frozenset(read - {("", "forward")})  # in place of which this function stands
                self._known.append(_Known(entered, places, attributes_at(module, places), beside, recording))
            return output

        return forward
