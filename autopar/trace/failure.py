"""What went wrong when a model could not be traced: module, line and reason."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.loss import Root

_RUNS_THE_MODEL = ("loss.py", "dims.py")
"""Files of this folder in which errors of models show: they call the model and its loss, or are models."""
_TORCH = str(Path(torch.__file__).parent)


def trace_error(model: nn.Module, error: BaseException | None) -> TraceError:
    """A TraceError that names the innermost module and line of the model in `error`'s traceback, and the reason."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__ if error else None)]
    root = next((r for f in frames if isinstance(r := f.f_locals.get("self"), Root)), None)
    own = [f for f in frames if root is not None and _module_path(root, f) is not None and not _in_library(f)]
    where = type(model).__name__
    if own and root is not None:
        where = f"{_module_path(root, own[-1]) or where}, {_line(own[-1], error)}"
    reason = str(error).strip().split("\n\n")[0][:600] if error else "no reason given"
    kind = type(error).__name__
    return TraceError(
        f"{where}: can't be traced ({kind}: {reason}). "
        "Make forward free of branches and sizes that depend on tensor values, or mend the line named."
    )


def is_own_bug(error: BaseException) -> bool:
    """Whether `error` was raised by the code of this folder itself, not by torch or by the model it traces."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    file = Path(frames[-1].f_code.co_filename) if frames else Path()
    return file.parent == Path(__file__).parent and file.name not in _RUNS_THE_MODEL


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _in_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_TORCH, str(Path(__file__).parent)))


def _module_path(root: Root, frame: FrameType) -> str | None:
    """Path of the module whose method the frame runs; None if it is none of the model's."""
    owner = frame.f_locals.get("self")
    if not isinstance(owner, nn.Module):
        return None
    return next((path for path, module in root.model.named_modules() if module is owner), None)


def _line(frame: FrameType, error: BaseException | None) -> str:
    number = next(n for f, n in traceback.walk_tb(error.__traceback__ if error else None) if f is frame)
    return f"{frame.f_code.co_filename}:{number}"
