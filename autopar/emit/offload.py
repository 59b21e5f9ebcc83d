"""What a layer saves for its backward pass, kept in the host's memory from forward to backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.emit.torch_private import StorageWeakRef
from autopar.shard.host import from_host, to_host


class HostCopy:
    """A device's storage (or the part of it that one small view reads) in the host's memory.

    It comes back once for all that was saved of it, and is let go when each of these has been asked for.
    """

    def __init__(self, storage: Tensor) -> None:
        self._device, self._kept = storage.device, to_host(storage)
        self._back: Tensor | None = None
        self._waiting = 0

    def saved(self) -> None:
        """One more tensor is saved of it."""
        self._waiting += 1

    def back(self) -> Tensor:
        """The storage on the device."""
        storage = self._back if self._back is not None else from_host(self._kept, self._device)
        self._waiting -= 1
        self._back = storage if self._waiting > 0 else None
        return storage


class Kept:
    """A saved tensor: how it lies in a host copy; `first` is the element that the copy begins at."""

    def __init__(self, tensor: Tensor, copy: HostCopy, first: int) -> None:
        self._shape, self._stride, self._first = tensor.shape, tensor.stride(), tensor.storage_offset() - first
        self._copy = copy
        copy.saved()

    def back(self) -> Tensor:
        """The tensor on the device."""
        return torch.as_strided(self._copy.back(), self._shape, self._stride, self._first)


@contextmanager
def offloading(held: Iterable[Tensor]) -> Iterator[None]:
    """Meanwhile tensors that autograd saves go to the host; they come back when the backward pass asks for them.

    Left where they are: integers (indices, labels), and what lies in the storages of `held` (parameters and buffers,
    which stay on the device anyway).
    """
    staying = {t.untyped_storage().data_ptr() for t in held}
    copies: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, HostCopy]] = {}

    def pack(tensor: Tensor) -> Tensor | Kept:
        whole = tensor.untyped_storage()
        integer = not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        if integer or not tensor.numel() or whole.data_ptr() in staying:
            return tensor
        # The weak reference keeps the number of a storage from being given to another one, but not its memory.
        reference = StorageWeakRef(whole)
        first, length = _part(tensor)
        key = (reference.cdata, first, tensor.dtype)
        if key not in copies:
            flat = torch.as_strided(tensor.detach(), (length,), (1,), first)
            copies[key] = reference, HostCopy(flat)
        return Kept(tensor, copies[key][1], first)

    def unpack(kept: Tensor | Kept) -> Tensor:
        return kept.back() if isinstance(kept, Kept) else kept

    with saved_tensors_hooks(pack, unpack):
        yield


def _part(tensor: Tensor) -> tuple[int, int]:
    """First element and number of elements of its storage that are copied for a tensor: all, or what it reads of them
    where that is less than half (rows of a batch)."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()), span) if 2 * span < elements else (0, elements)
