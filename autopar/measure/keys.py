"""Keys as text and back: canonical JSON, so that equal keys have equal text on every machine."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from autopar.errors import ProfileError
from autopar.graph import CollectiveKey, DeviceArg, Dtype, Operand, OpKey

Key: TypeAlias = OpKey | CollectiveKey


def encode_key(key: Key) -> str:
    """Canonical JSON of a key."""
    if isinstance(key, CollectiveKey):
        data: dict[str, Any] = {"kind": key.kind, "bytes": key.bytes, "ranks": key.ranks, "stride": key.stride}
    else:
        data = {"target": key.target, "args": _plain(key.args), "kwargs": {k: _plain(v) for k, v in key.kwargs}}
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def decode_key(text: str) -> Key:
    """Inverse of `encode_key`; raises ProfileError with the text when it is no key."""
    try:
        data = json.loads(text)
        if "kind" in data:
            return CollectiveKey(data["kind"], data["bytes"], data["ranks"], data["stride"])
        kwargs = tuple((k, _argument(v)) for k, v in data["kwargs"].items())
        return OpKey(data["target"], tuple(map(_argument, data["args"])), kwargs)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProfileError(f"{text[:200]!r} is no key of a profile. Take the profile anew.") from None


def _plain(value: object) -> Any:
    if isinstance(value, Operand):
        return {"shape": list(value.shape), "dtype": value.dtype, "grad": value.requires_grad}
    if isinstance(value, Dtype):
        return {"dtype_name": value.name}
    if isinstance(value, DeviceArg):
        return {"device": True}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ProfileError(f"an argument of type {type(value).__name__} ({value!r}) can't stand in the key of a profile")


def _argument(data: Any) -> object:
    if isinstance(data, list):
        return tuple(map(_argument, data))
    if not isinstance(data, dict):
        return data
    if "shape" in data:
        return Operand(tuple(data["shape"]), data["dtype"], data["grad"])
    return Dtype(data["dtype_name"]) if "dtype_name" in data else DeviceArg()
