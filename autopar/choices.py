"""The words users choose among when they ask for a plan, spelled once for Python, command line and job files."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigError
from autopar.plan import POLICIES

Optimizer: TypeAlias = Literal["adamw", "adam", "sgd", "adafactor", "adamw8bit"]
Objective: TypeAlias = Literal["step_time", "tokens_per_s_per_device", "cost_per_token", "energy_per_token", "memory"]

DTYPES: tuple[str, ...] = tuple(POLICIES)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
OBJECTIVES: tuple[str, ...] = get_args(Objective)

BYTE_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def listed(words: tuple[str, ...]) -> str:
    """`a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def parse_bytes(text: str | int | None) -> int | None:
    """Bytes from `70GiB`, `80 GB` or a number; None stays None. Raises ConfigError on anything else."""
    if text is None or (isinstance(text, int) and not isinstance(text, bool) and text > 0):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", str(text))
    unit = BYTE_UNITS.get((match.group(2) or "B").upper()) if match else None
    found = int(float(match.group(1)) * unit) if match and unit else 0
    if found < 1:
        raise ConfigError(f"memory_limit={text!r}: give bytes, or a size such as 70GiB, 512MiB or 80GB")
    return found


def optimizer_name(optimizer: str | type) -> str:
    """The name of an optimizer given by name or as a torch.optim class; raises ConfigError for what is neither."""
    if isinstance(optimizer, type):
        return optimizer.__name__.lower()
    name = optimizer.lower() if isinstance(optimizer, str) else type(optimizer).__name__
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer={name!r}: give {listed(OPTIMIZERS)}, or a torch.optim class")
    return name
