"""A submodule that can't be taken apart, as one operator: what the graph keeps of it. Torch-free.

Its tensors are the submodule's parameters and buffers and then the tensors among its arguments; its results are the
tensors it returns. All else is in a text (`Form`), the operator's last argument.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

OPAQUE = "autopar.opaque.default"
"""Name of the operator: `opaque(Tensor[] tensors, str form) -> Tensor[]`."""
OPAQUE_MARK = "autopar_trace.opaque.default"
"""Name of what stands for it in an exported graph."""


@dataclass(frozen=True)
class Form:
    """How to call the submodule, and what a call is like.

    `names` are those of parameters and buffers in the submodule; `call` is its arguments (`[positional, keywords]`)
    with `{"tensor": i}` for the i-th tensor among them. `apart`: whether samples are kept apart, so that the batch can
    be split. `draws`: whether it draws random numbers. `flops` and `saved_bytes` of the forward pass are those of one
    sample, whose largest argument has so many `elements`.
    """

    names: tuple[str, ...]
    call: Any
    apart: bool
    draws: bool
    flops: float
    elements: int
    saved_bytes: int

    def text(self) -> str:
        """The form as a text."""
        return json.dumps(asdict(self), sort_keys=True)


@lru_cache(maxsize=1024)
def form_of(text: str) -> Form:
    """Inverse of `Form.text`."""
    data = json.loads(text)
    return Form(tuple(data.pop("names")), **data)


def encoded(data: Any, tensors: list[Any], is_tensor: Any) -> Any:
    """`data` as plain JSON, its tensors appended to `tensors`. Raises TypeError on what is not plain."""
    if is_tensor(data):
        tensors.append(data)
        return {"tensor": len(tensors) - 1}
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if type(data) is tuple:
        return {"tuple": [encoded(part, tensors, is_tensor) for part in data]}
    if type(data) is list:
        return [encoded(part, tensors, is_tensor) for part in data]
    if type(data) is dict and all(isinstance(key, str) for key in data):
        return {"dict": [[key, encoded(value, tensors, is_tensor)] for key, value in data.items()]}
    raise TypeError(f"{type(data).__name__} among its arguments")


def decoded(data: Any, tensors: Any) -> Any:
    """Inverse of `encoded`."""
    if isinstance(data, list):
        return [decoded(part, tensors) for part in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return tensors[data["tensor"]]
    if "tuple" in data:
        return tuple(decoded(part, tensors) for part in data["tuple"])
    return {key: decoded(value, tensors) for key, value in data["dict"]}
