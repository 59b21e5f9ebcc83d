"""What went wrong when a model could not be traced: module, line and reason."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.loss import Root
from autopar.trace.own_gradients import OwnGradientError
from autopar.trace.sizes import DependsOnDataError, NotLinearError, NotOneOperator

_OWN = Path(__file__).parent
_RUNS_THE_MODEL = ("loss.py", "decoder.py", "numbers.py", "instead.py", "standins.py", "trial.py")
"""Files below this folder in which errors of models show: they call the model, or what stands for its calls."""
_CALLS_THE_MODEL = ("forward", "read", "_run")
"""Functions of other files that do."""
_TORCH = str(Path(torch.__file__).parent)
_MODULE = nn.Module._call_impl.__code__.co_filename


def trace_error(model: nn.Module, error: BaseException) -> TraceError:
    """A TraceError that names the innermost module and line of the model in `error`'s traceback, and the reason."""
    remedy = (
        "Make forward free of branches and sizes that depend on tensor values, put what has them in a submodule of its "
        "own, which is then one operator, or mend the line named."
    )
    if isinstance(error, OwnGradientError):
        remedy = "Call it in a submodule of its own, which is then one operator."
    return TraceError(f"{_place(model, error)}: can't be traced ({_said(error)}). {remedy}")


def forward_error(model: nn.Module, error: BaseException) -> TraceError:
    """The same of an `error` that forward raises by itself, whoever calls it."""
    remedy = "Give inputs of the shapes and keywords that the model takes, or mend the line named."
    return TraceError(f"{_place(model, error)}: forward fails on these example_inputs ({_said(error)}). {remedy}")


def _place(model: nn.Module, error: BaseException) -> str:
    frames = _frames(error)
    root = _root(frames)
    own = [f for f, _ in frames if root is not None and _module_path(root, f) is not None and not _in_library(f)]
    where = type(model).__name__
    if isinstance(error, DependsOnDataError) and error.path:
        where = ", ".join(filter(None, (error.path, error.line)))
    elif own and root is not None:
        where = f"{_module_path(root, own[-1]) or where}, {_innermost_line(frames, own[-1])}"
    return where


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10) * 2)[0][:600]}"


def depends_on_data(error: BaseException) -> bool:
    """Whether a trace failed as the model asks for values, which no other way of tracing would give it."""
    kinds = {type(e).__name__ for e in _causes(error)}
    return bool(kinds & _ASKS_FOR_VALUES) or any(text in str(error) for text in _SAYS_SO)


def module_of(error: BaseException) -> str:
    """Path of the innermost submodule in which a trace failed; '' if it was the model itself or isn't known."""
    if isinstance(error, (DependsOnDataError, NotOneOperator)):
        return error.path
    if found := _CHANGES_DATA.search(str(error)):
        return found[1]
    frames = _frames(error)
    root = _root(frames)
    called = [f for f, _ in frames if not _is_conversion(f)]
    paths = [path for f in called if root is not None and (path := _module_path(root, f)) is not None]
    return paths[-1] if paths else ""


_ASKS_FOR_VALUES = {
    "DependsOnDataError", "NotOneOperator", "OwnGradientError", "GuardOnDataDependentSymNode",
    "DataDependentOutputException", "DynamicOutputShapeException",
}  # fmt: skip
_SAYS_SO = (
    "item() cannot be called on meta tensors", "data-dependent", "Cannot copy out of meta tensor",
    "fake tensor in the exported program constant's list",
)  # fmt: skip
_CHANGES_DATA = re.compile(r"model attribute: model\.(\S+)\.\w*lifted_tensor_\d")
"""What torch says of a tensor that was made, or taken as `.data`, beside the trace; the path of the module."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _frames(error: BaseException | None) -> list[tuple[FrameType, int]]:
    """Frames with line numbers of the error or, if the model is not among them, of what it came from."""
    found: list[tuple[FrameType, int]] = []
    for each in _causes(error):
        found = list(traceback.walk_tb(each.__traceback__))
        if _root(found) is not None:
            return found
    return found


def _root(frames: list[tuple[FrameType, int]]) -> Root | None:
    return next((r for f, _ in frames if isinstance(r := f.f_locals.get("self"), Root)), None)


def is_own_bug(error: BaseException) -> bool:
    """Whether `error` was raised by the code of this folder itself, not by torch or by the model it traces."""
    if isinstance(error, (DependsOnDataError, NotLinearError, NotOneOperator, OwnGradientError)):  # said of the model
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_code.co_name in _CALLS_THE_MODEL:
        return False
    file = Path(frames[-1].f_code.co_filename)
    return file.is_relative_to(_OWN) and file.name not in _RUNS_THE_MODEL


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _in_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_TORCH, str(_OWN)))


def _is_conversion(frame: FrameType) -> bool:
    """Whether the frame changes a module (`to`, `double`) and doesn't call it: its caller is what can't be traced."""
    return frame.f_code.co_filename == _MODULE and "call" not in frame.f_code.co_name


def _module_path(root: Root, frame: FrameType) -> str | None:
    """Path of the module whose method the frame runs; None if it is none of the model's.

    While torch exports, modules are reached through proxies, which have their attributes.
    """
    owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    if not isinstance(owner, nn.Module):
        return None
    return next((path for path, module in root.model.named_modules() if vars(module) is vars(owner)), None)


def _innermost_line(frames: list[tuple[FrameType, int]], method: FrameType) -> str:
    """`file:line` of the last frame at or below the method of a module that is the user's own code."""
    begun = [f for f, _ in frames].index(method)
    frame, number = [(f, n) for f, n in frames[begun:] if not _in_library(f)][-1]
    return f"{frame.f_code.co_filename}:{number}"
